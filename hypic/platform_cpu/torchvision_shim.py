"""Let ``import torchvision`` succeed where its C library cannot load.

torchvision's wheel on PyPI is built against CUDA. Beside a CPU build of torch its C library does not load, so the
schemas of its operators are missing and ``torchvision._meta_registrations`` fails on them with "operator
torchvision::nms does not exist". Transformers needs no such operator, only the import. :func:`install` declares the
schemas just before that module is imported, if they are missing then.

:func:`main` writes a ``.pth`` file that calls :func:`install` in every process of this environment, spawned ones
included, and only where torchvision is broken in this way. The Makefile runs it; no wheel carries the file.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_TRIGGER = "torchvision._meta_registrations"
_SCHEMAS = {name: f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")}
_PTH_NAME = "zz_hypic_torchvision.pth"
_PTH_LINE = (
    "import importlib.util; importlib.util.find_spec('hypic') and "
    "__import__('hypic.platform_cpu.torchvision_shim', fromlist=['install']).install()\n"
)
_libraries: list[Any] = []  # a torch.library.Library drops its definitions when it is collected


class _DeclareSchemas(MetaPathFinder):
    """Finds no module itself; its turn comes before torchvision registers fake kernels for its operators."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == _TRIGGER:
            sys.meta_path.remove(self)
            declare_missing()


def declare_missing() -> None:
    """Declare the operator schemas that torchvision's C library should have brought."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _libraries.append(library)


def install() -> None:
    """Watch for the import of torchvision. Cheap: imports nothing."""
    if _TRIGGER not in sys.modules and not any(isinstance(f, _DeclareSchemas) for f in sys.meta_path):
        sys.meta_path.insert(0, _DeclareSchemas())


def torchvision_is_broken() -> bool:
    """Whether a fresh interpreter of this environment, without site hooks of ours, fails to import torchvision."""
    ours = _DeclareSchemas.__name__
    code = (
        f"import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != '{ours}']\n"
        "try: import torchvision\n"
        "except RuntimeError as e: sys.exit('torchvision::' in str(e))"
    )
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 1


def main() -> None:
    """Write or remove the ``.pth`` file of this environment, as torchvision here needs it."""
    pth = Path(sysconfig.get_path("purelib")) / _PTH_NAME
    if torchvision_is_broken():
        pth.write_text(_PTH_LINE)
        print(f"torchvision's C library does not load beside this torch: wrote {pth}")
    else:
        pth.unlink(missing_ok=True)
        print("torchvision imports without help")
