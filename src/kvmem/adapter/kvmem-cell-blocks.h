// Whole blocks of cells in llama_kv_cells.
#pragma once

#include "kvmem.h"

#include "llama-kv-cells.h"

#include <set>
#include <utility>
#include <vector>

// llama_kv_cells keeps the used cells and each sequence's positions in ordered sets. Its own calls search both for
// every cell, and look through all 256 sequences in some; for a whole window that takes as long as the copies. The
// cells of a block lie side by side in both sets, so one search finds them all. Nodes of forgotten cells are kept for
// those that come: a reselection allocates nothing.
struct kvmem_cell_blocks {
    explicit kvmem_cell_blocks(llama_kv_cells & cells) : cells(cells) {}

    // forgets what is in n cells from `first` on
    void clear(uint32_t first, uint32_t n);

    // makes n cells visible in sequence 0; false, and nothing changes, if one of them is in use
    bool publish(uint32_t first, const kvmem_cell_meta * meta, uint32_t n);

  private:
    using used_set = std::set<uint32_t>;
    using pos_set  = std::set<std::pair<llama_pos, uint32_t>>;

    // takes one node out and returns the one behind it
    template <typename S, typename N>
    typename S::iterator take(S & set, typename S::iterator it, std::vector<N> & spare);

    // puts a value in front of `hint`, where it belongs there
    template <typename S, typename N>
    static void put(S & set, typename S::iterator hint, const typename S::value_type & value, std::vector<N> & spare);

    llama_kv_cells & cells;

    std::vector<used_set::node_type> spare_used; // at most as many as there are cells
    std::vector<pos_set::node_type>  spare_pos;
};
