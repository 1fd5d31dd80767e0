"""A small byte-level BPE tokenizer with real merges, trained on prose that every Python installation carries."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1536
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END, *VISION)
"""Special tokens in order of their ids, which start at 0."""

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages and messages[0]['role'] == 'system' and messages[0]['content'] is string %}
{{- messages[0]['content'] + '\\n\\n' }}{% endif %}
{{- '# Tools\\n\\n<tools>\\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
{{- '</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message['role'] == 'system' and message['content'] is string) %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}
{%- for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}
{%- endif %}
{%- for call in message.get('tool_calls') or [] %}
{{- '\\n<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def training_text() -> list[str]:
    """Paragraphs of English with code in them: the language reference behind Python's ``help()``, sorted by topic."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def write_tokenizer(directory: Path) -> None:
    """Train on :func:`training_text` and save a Hugging Face tokenizer with the chat template into ``directory``."""
    save_tokenizer(train_tokenizer(training_text(), VOCAB_SIZE), directory)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE (``tokenizers.Tokenizer``) with the SPECIAL tokens first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a trained tokenizer as a Hugging Face tokenizer with the chat template."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
