"""The engine's process on vLLM's V2 runner without a GPU: Triton kernels run in the interpreter.

vLLM picks the V2 runner only where a Triton backend exists, so a stand-in one is registered before
vLLM is imported. For tests: hundreds of times slower than a GPU, the same code path.
"""

from __future__ import annotations

import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import triton.backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return False


triton.backends.backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)

from mismatch_audit.programs.vllm_worker import serve  # noqa: E402

if __name__ == "__main__":
    code = serve()
    sys.stderr.flush()
    os._exit(code)
