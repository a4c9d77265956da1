"""How options are declared."""

from typing import Any

from typer import Option

__all__ = ["flag", "llama_flag"]


def flag(*names: str, env: str | None = None, panel: str, help: str) -> Any:
    """An option; a flag wins over its variable."""
    return Option(*names, envvar=env, show_envvar=env is not None, rich_help_panel=panel, help=help)


def llama_flag(*names: str, env: str, panel: str, help: str) -> Any:
    """An option that llama-server has too, with llama-server's variable."""
    return flag(*names, env=f"LLAMA_ARG_{env}", panel=panel, help=help)
