"""The proxy: OpenAI-compatible, between clients and engines; obeys a routing table.

Starlette for the routes, uvicorn as the server, aiohttp as the client (docs/routing.md says why).
"""
