// How the attention of a step is cut into tiles, and the order in which threads take them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "linear.h"
#include "simd.h"

namespace quire {

constexpr int TILE_KEYS = 4 * LANES;

// Addresses of 64 keys and their values, by halves of groups of 16, since blocks may be of 8 tokens. Those from first_key to
// num_keys - 1 are seen by some query: others may be of other sequences, or NaN.
template <class T>
struct KeyTile {
    int64_t first_key, num_keys, first_group, num_groups;
    const T* keys[TILE_KEYS / 8];
    const T* values[TILE_KEYS / 8];
};

// The same of a cache in 8 bits.
struct CodeTile : KeyTile<int8_t> {
    const float* key_scales[TILE_KEYS / 8];
    const float* value_scales[TILE_KEYS / 8];
};

// Queries of a tile, times heads of a group: they share each key that is loaded.
constexpr int TILE_ROWS = 48;

// The sequences of a step.
struct Sequences {
    int64_t count;
    int64_t max_blocks;
    const int32_t* block_tables;  // [count, max_blocks]
    const int32_t* query_starts;  // [count + 1]
    const int32_t* context_lens;  // [count]
};

inline int64_t queries_per_tile(int64_t group) { return std::max<int64_t>(1, TILE_ROWS / group); }

// Whether this number of rows is bound by memory: loading the keys takes longer than the products.
inline bool is_memory_bound(int64_t rows) { return rows <= ROWS_WIDE; }

// The work of one thread at a time: queries first to last - 1 of a sequence, for some KV heads.
struct Tile {
    int64_t sequence, first, last, first_head, last_head;
};

// Orders larger tiles first, so that threads end together. Tiles bound by memory and tiles bound by computation are
// interleaved in proportion, so that they run beside each other.
inline void order(std::vector<Tile>& tiles, const Sequences& sequences, int64_t group) {
    struct OrderedTile {
        Tile tile;
        double work;
        bool waits;
        double place;  // the share of its kind's work that is ordered before it
    };
    std::vector<OrderedTile> placed;
    double total[2] = {}, before[2] = {};
    for (const Tile& p : tiles) {
        const int64_t queries = p.last - p.first;
        const double work = static_cast<double>(queries * (p.last_head - p.first_head) * sequences.context_lens[p.sequence]);
        placed.push_back({p, work, is_memory_bound(queries * group), 0.0});
        total[placed.back().waits] += work;
    }
    std::stable_sort(placed.begin(), placed.end(), [](const OrderedTile& a, const OrderedTile& b) { return a.work > b.work; });
    for (OrderedTile& p : placed) {
        p.place = before[p.waits] / total[p.waits];
        before[p.waits] += p.work;
    }
    std::stable_sort(placed.begin(), placed.end(), [](const OrderedTile& a, const OrderedTile& b) { return a.place < b.place; });
    std::transform(placed.begin(), placed.end(), tiles.begin(), [](const OrderedTile& p) { return p.tile; });
}

// All tiles of a step.
inline std::vector<Tile> split_into_tiles(const Sequences& sequences, int64_t num_kv_heads, int64_t group, int threads) {
    const int64_t per_tile = queries_per_tile(group);
    std::vector<Tile> tiles;
    for (int64_t s = 0; s < sequences.count; ++s) {
        const int64_t queries = sequences.query_starts[s + 1] - sequences.query_starts[s];
        // A block's heads are neighbours in memory, fastest to load together. But every thread needs a share.
        const int64_t wanted = std::max<int64_t>(1, sequences.count * num_kv_heads / (4 * threads));
        const int64_t heads = std::clamp<int64_t>(per_tile / std::max<int64_t>(1, queries), 1, wanted);
        for (int64_t first = 0; first < queries; first += per_tile)
            for (int64_t head = 0; head < num_kv_heads; head += heads)
                tiles.push_back({s, first, std::min(queries, first + per_tile), head,
                                  std::min(num_kv_heads, head + heads)});
    }
    order(tiles, sequences, group);
    return tiles;
}

}  // namespace quire
