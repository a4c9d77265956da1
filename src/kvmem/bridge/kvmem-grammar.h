#pragma once

#include "llama.h"

#include <string>

// Throws kvmem_invalid where the grammar does not parse, or would run without an end.
void kvmem_grammar_require(const llama_vocab * vocab, const std::string & grammar);
