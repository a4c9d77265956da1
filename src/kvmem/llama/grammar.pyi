from typing import Any

from kvmem.llama.model import Model

__all__ = ["check_grammar", "schema_grammar"]

def schema_grammar(schema: Any) -> str: ...
def check_grammar(model: Model, grammar: str) -> None: ...
