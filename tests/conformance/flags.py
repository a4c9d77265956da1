"""The flags of llama-server that llama.cpp's server tests start a server with.

`--no-jinja`, which most of them set, is read and dropped, for both servers: kvmem has only Jinja.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

MODELS: Final = {
    "": "stories.gguf",  # a router: test_security asks it only about CORS
    "ggml-org/test-model-stories260K": "stories.gguf",
    "ggml-org/models": "stories-split-00001-of-00003.gguf",  # of it test_load_split_model alone
}
"""The file of ours for each Hugging Face repository that the tests name."""


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Flags of what does not apply end the process with status 2."""
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--hf-repo", default="")
    parser.add_argument("--hf-file")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--alias", default="")
    parser.add_argument("--tags", default="")
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=-1)
    parser.add_argument("--ctx-size", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--ubatch-size", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--n-predict", type=int, default=-1)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--kv-unified", action="store_true")
    parser.add_argument("--context-shift", action="store_true")
    parser.add_argument("--slots", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--no-ui", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--backend_sampling", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--cors-origins")
    parser.add_argument("--jinja", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--chat-template")
    parser.add_argument("--chat-template-file")
    parser.add_argument("--reasoning", choices=("on", "off", "auto"))
    parser.add_argument("--reasoning-format", choices=("deepseek", "none"))
    flags = parser.parse_args(arguments)
    if flags.hf_repo not in MODELS:
        parser.error(f"no model of ours stands for {flags.hf_repo}")
    flags.model = Path(os.environ["CONFORMANCE_MODELS"]) / MODELS[flags.hf_repo]
    return flags
