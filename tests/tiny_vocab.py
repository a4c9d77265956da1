"""The tokenizer and chat templates of the tiny test models.

A real byte-level BPE: 256 byte tokens, a few merges and the special tokens of ChatML, thinking
and tool calls, so that every text can be written and read back and templates work as they do
on big models. Ids are small and stable: byte tokens are 0..255, merged tokens follow, specials
come last.
"""

from typing import Final

import gguf

MERGES: Final = (
    ("h", "e"), ("t", "he"), ("i", "n"), ("e", "r"), ("o", "n"), ("a", "n"), ("r", "e"),
    ("Ġ", "the"), ("Ġ", "a"), ("in", "g"), ("an", "d"), ("Ġ", "and"), ("o", "u"), ("l", "l"),
)  # fmt: skip
"""Pairs in rank order. ``Ġ`` is how byte-level BPE writes a space."""

CONTROL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
)  # fmt: skip
USER_DEFINED: Final = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip

CHATML: Final = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Roles and contents, nothing else."""

CHATML_TOOLS: Final = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Tools, one JSON object a line:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call one as <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE' }}
    {{- '\\n</parameter>\\n</function>\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- elif enable_thinking is defined %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""
"""ChatML with thinking and tool calls in the XML form; a tool's reply is a user turn."""

CHATML_JSON: Final = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\nCall one as <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
"""The same with calls as JSON, read by what llama.cpp finds out about the template; the model opens
its thought itself.
"""


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE uses for each byte value 0..255.

    Source: GPT-2's byte table: printable Latin-1 letters stand for themselves, the others are
    numbered upwards from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def add_vocabulary(
    writer: gguf.GGUFWriter,
    *,
    pre: str = "qwen2",
    template: str = CHATML_TOOLS,
    extra: tuple[str, ...] = (),
    n_tokens: int = 0,
) -> dict[str, int]:
    """Write tokenizer and template. Returns the id of every token by its text.

    `extra` are further user-defined tokens, appended after the specials; behind them come unused
    ones, up to `n_tokens`.
    """
    tokens = byte_letters() + [left + right for left, right in MERGES]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for texts, kind in (
        (CONTROL, gguf.TokenType.CONTROL),
        (USER_DEFINED + extra, gguf.TokenType.USER_DEFINED),
    ):
        tokens += texts
        types += [kind] * len(texts)
    fillers = [f"[unused{i}]" for i in range(n_tokens - len(tokens))]
    tokens += fillers
    types += [gguf.TokenType.UNUSED] * len(fillers)
    ids = {text: index for index, text in enumerate(tokens)}

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in MERGES])
    writer.add_bos_token_id(ids["<|endoftext|>"])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    return ids
