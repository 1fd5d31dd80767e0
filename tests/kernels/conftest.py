"""Every kernel test runs on each implementation that this process can run (the ``target`` fixture).

An ordinary run tests the torch references; with a GPU it tests the Triton kernels there as well. Triton's interpreter
must be switched on before Triton is imported, so it gets a process of its own: ``test_interpreted.py`` starts
``TRITON_INTERPRET=1 pytest tests/kernels``, which runs these same tests on the kernels, at smaller sizes.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import INTERPRETED, TARGETS

if INTERPRETED:
    import interpreter

    interpreter.patch()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        metafunc.parametrize("target", TARGETS, ids=str)
