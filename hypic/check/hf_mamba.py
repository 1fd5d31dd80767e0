"""A fault of transformers 5.12.1 in Nemotron-H's scan without kernels, and the way around it."""

from __future__ import annotations

from typing import Any


def one_chunk_scans(model: Any) -> Any:
    """The model, whose Nemotron-H mixers take every prompt as one chunk.

    From chunk to chunk their plain-torch path sums over the wrong axis (``result = (decay_chunk * states).sum(dim=2)`` in
    ``NemotronHMamba2Mixer.torch_forward``): behind the first chunk it differs from its own token-by-token path.
    """

    def whole(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        mixer.chunk_size = hidden.shape[1]

    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.register_forward_pre_hook(whole, with_kwargs=True)
    return model
