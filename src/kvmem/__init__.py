"""llama.cpp inference with tiered KV memory for long-running agents."""

import logging

# a library leaves the handlers to its user; without this, Python would print warnings of a user who set none
logging.getLogger(__name__).addHandler(logging.NullHandler())
