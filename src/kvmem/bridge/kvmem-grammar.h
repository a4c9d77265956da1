#pragma once

#include "llama.h"

#include <string>

// Throws kvmem_invalid where the grammar does not parse; llama.cpp has logged why.
void kvmem_grammar_require(const llama_vocab * vocab, const std::string & grammar);
