#include "kvmem-cell-blocks.h"

template <typename S, typename N>
typename S::iterator kvmem_cell_blocks::take(S & set, typename S::iterator it, std::vector<N> & spare) {
    if (spare.size() >= cells.size()) {
        return set.erase(it);
    }
    const auto next = std::next(it);
    spare.push_back(set.extract(it));
    return next;
}

template <typename S, typename N>
void kvmem_cell_blocks::put(
        S & set, typename S::iterator hint, const typename S::value_type & value, std::vector<N> & spare) {
    if (spare.empty()) {
        set.insert(hint, value);
        return;
    }
    spare.back().value() = value;
    set.insert(hint, std::move(spare.back()));
    spare.pop_back();
}

void kvmem_cell_blocks::clear(uint32_t first, uint32_t n) {
    auto & positions = cells.seq_pos[0];
    auto   used      = cells.used.lower_bound(first);
    auto   position  = positions.end();
    for (uint32_t i = first; i < first + n; ++i) {
        if (cells.pos[i] == -1) {
            continue;
        }
        used = take(cells.used, used, spare_used);

        const std::pair<llama_pos, uint32_t> entry = { cells.pos[i], i };
        if (position == positions.end() || *position != entry) {
            position = positions.find(entry);
        }
        position = take(positions, position, spare_pos);

        cells.pos[i]   = -1;
        cells.shift[i] = 0;
        cells.ext[i].reset();
        cells.seq[i].reset();
    }
}

bool kvmem_cell_blocks::publish(uint32_t first, const kvmem_cell_meta * meta, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        if (cells.pos[first + i] != -1) {
            return false;
        }
    }
    if (n == 0) {
        return true;
    }
    auto &     positions = cells.seq_pos[0];
    const auto used      = cells.used.lower_bound(first);
    const auto position  = positions.lower_bound({ meta[0].pos[0], first });
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t cell = first + i;

        put(cells.used, used, cell, spare_used);
        put(positions, position, { meta[i].pos[0], cell }, spare_pos);

        auto & ext      = cells.ext[cell];
        ext.x           = meta[i].x;
        ext.y           = meta[i].y;
        ext.tok         = meta[i].token;
        cells.pos[cell] = meta[i].pos[0];
        cells.seq[cell].set(0);
    }
    return true;
}
