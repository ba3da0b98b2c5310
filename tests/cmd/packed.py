"""msgpack for the tests. Where this Python lacks it the test is run again in the environment of the tests, which has it: import this before anything is done."""
import os
import sys

try:
    import msgpack
except ImportError:
    if "PD_PY" not in os.environ or os.environ.get("PD_PY_TRIED"):
        raise
    os.execve(os.environ["PD_PY"], [os.environ["PD_PY"], *sys.argv], dict(os.environ, PD_PY_TRIED="1"))

__all__ = ["msgpack"]
