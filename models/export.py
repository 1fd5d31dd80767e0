"""Make the folder that SGLang and transformers load, from the weights that training wrote.

python -m models.export weights.safetensors models/almanac
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .gates import HERE, load_weights
from .network import save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=HERE, help="folder with the tokenizer")
    args = parser.parse_args()
    save(load_weights(args.weights).hf, args.out, args.data)


if __name__ == "__main__":
    main()
