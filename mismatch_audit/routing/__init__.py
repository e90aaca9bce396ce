"""Which engine may answer which request: a routing table from an audit, and a proxy that obeys it.

The table's modules (features, approximate, conditions, standing, build, mixture, table) know
nothing of HTTP; the proxy's (proxy/) know nothing of contracts.
"""
