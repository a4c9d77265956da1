#pragma once

#include <string>

// Throws kvmem_invalid where llama.cpp's parser or sampler would take a grammar (GBNF) but run without an end or eat
// the memory, and where the text is malformed, by line and rule. Not all that is malformed is found.
void kvmem_gbnf_require_bounded(const std::string & grammar);
