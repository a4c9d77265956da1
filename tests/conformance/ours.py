"""`kvmem serve`, started with the flags that llama.cpp's server tests give llama-server."""

import argparse
import os
import re
import sys

from flags import parse_flags


def main() -> None:
    command = [sys.executable, "-m", "kvmem", "serve", *kvmem_flags(parse_flags(sys.argv[1:]))]
    os.execv(command[0], command)


def kvmem_flags(flags: argparse.Namespace) -> list[str]:
    """The same in kvmem's words. What it has no flag for, it does anyway or never.

    llama-server divides `--ctx-size` among its slots; kvmem's `-c` is what one history may have,
    and it keeps a conversation where llama-server has a slot.
    """
    window = flags.ctx_size // (1 if flags.kv_unified else flags.parallel)
    said: dict[str, object] = {
        "--model": flags.model,
        "--alias": flags.alias.split(",")[0],
        "--host": flags.host,
        "--port": flags.port,
        "--ctx-size": window,
        "--kvmem-conversations": flags.parallel,
        "--batch-size": flags.batch_size,
        "--threads": flags.threads,
        "--n-predict": flags.n_predict,
        "--temp": flags.temp,
        "--seed": flags.seed,
        "--api-key": flags.api_key,
        "--chat-template": _as_jinja(flags.chat_template),
        "--chat-template-file": flags.chat_template_file,
        "--reasoning": flags.reasoning,
        "--cors-origins": flags.cors_origins or "*",  # what llama-server has where it is left out
    }
    words = [word for name, value in said.items() if value for word in (name, str(value))]
    shown = ["--slots" if flags.slots else "--no-slots", *(["--metrics"] if flags.metrics else [])]
    return [*words, *shown, *(["--verbose"] if flags.verbose else [])]


def _as_jinja(template: str | None) -> str | None:
    """With Jinja a name is a text like any other. kvmem refuses it: it was meant otherwise."""
    if template is None or template == "chatml" or not re.fullmatch(r"[\w-]+", template):
        return template
    return f"{{{{- '{template}' -}}}}"


if __name__ == "__main__":
    main()
