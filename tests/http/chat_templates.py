"""Chat templates of the shapes found in the wild, reduced to what matters for finding text again."""

from __future__ import annotations

TEMPLATES = {
    # ChatML that walks through content parts.
    "parts": """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for content in m.content %}{% if content.type == 'text' %}{{ content.text }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    # Content is a string: SGLang joins parts with a space.
    "string": """\
{%- for m in messages %}{{ '[' + m.role + '] ' + m.content + '\\n' }}{% endfor %}{{ '[assistant]' }}""",
    "trim": """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content | trim) + '<|im_end|>\\n' }}{% endfor %}""",
    # Qwen3.5's shape: a macro for parts, trimmed; decisions on the last user turn; reasoning cut out of answers.
    "macro": """\
{#- image -#}{%- macro text_of(c) %}{% if c is string %}{{ c }}{% else %}
{%- for p in c %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}
{%- set ns = namespace(last=messages | length) %}
{%- for m in messages[::-1] %}{% set c = text_of(m.content) | trim %}
{%- if m.role == 'user' and not c.startswith('<tool_response>') and ns.last == messages | length %}
{%- set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% set c = text_of(m.content) | trim %}
{%- if m.role == 'assistant' and '</think>' in c and loop.index0 < ns.last %}
{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}
{{- '<|im_start|>assistant\\n<think>\\n' }}""",
    "json": """{%- for m in messages %}{{ {'role': m.role, 'text': m.content} | tojson }}{% endfor %}""",
    "twice": """{%- for m in messages %}{{ m.content + ' Again: ' + m.content }}{% endfor %}""",
    "upper": """{%- for m in messages %}{{ m.content | upper }}{% endfor %}""",
    "drops_system": """\
{%- for m in messages if m.role != 'system' %}{{ '[' + m.role + ']' + m.content }}{% endfor %}""",
    # Looks at the text itself, as reasoning models' templates do.
    "looks": """\
{%- for m in messages %}{% set c = m.content %}
{%- if m.role == 'assistant' and '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- ('[tool]' if c.startswith('<tool_response>') else '[' + m.role + ']') + c + '\\n' }}{% endfor %}""",
    "tools": """\
{%- if tools %}{{ 'TOOLS\\n' }}{% for t in tools %}{{ (t | tojson) + '\\n' }}{% endfor %}{{ 'END\\n' }}{% endif %}
{%- for m in messages %}{{ '[' + m.role + ']' + (m.content or '') + '\\n' }}{% endfor %}""",
    "tools_indented": """\
{%- for t in tools or [] %}{{ (t.function | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
{%- for m in messages %}{{ m.content }}{% endfor %}""",
    "tools_as_prose": """\
{%- for t in tools or [] %}{{ '### ' + t.function.name + '\\n' + (t.function.description or '') + '\\n' }}{% endfor %}
{%- for m in messages %}{{ m.content }}{% endfor %}""",
    "bos": """{{ bos_token }}{%- for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}""",
}
