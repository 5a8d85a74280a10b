// Attention over the paged cache, in place: causal or bidirectional, grouped heads, sliding window, soft cap, sinks.
//
// In a block, keys are stored dimension by dimension and values token by token (bfloat16: in pairs), in the order in
// which the products below read them. A query's result is a sum over tiles of 64 keys in their order, however its
// sequence was cut into steps.
//
// In 8 bits, codes are in that order too. A tile of keys is decoded once for a tile of queries; scores are multiplied by
// the keys' scales, and weights by the values'. So what is stored loses precision, and the products do not.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "amx_attention.h"
#include "attention_tiles.h"
#include "buffer.h"
#include "code_tiles.h"
#include "kv_cache.h"
#include "linear.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

struct AttentionRule {
    float scale;     // above 0
    float soft_cap;  // 0: none
    int64_t window;  // how many keys up to its own a query sees; 0: all
    int64_t bidirectional;  // whether queries also see the keys after their own, of a window as many as before it
    const float* sinks;  // [heads], one more score of each head, of a key without a value (arXiv:2309.17453); null: none
};

// A relative position bias: what is added to the scores of each head by the distance of a key from its query; null: nothing.
struct DistanceScores {
    const float* of_heads = nullptr;  // [heads, stride]; the products of queries and keys have no scale yet
    int64_t stride = 0;               // LANES more than there are distances: whole vectors are read
    int64_t own_place = 0;            // of the query's own key; those before it have lower places
};

// One thread's work on one tile at a time. `Products` is NoAttentionProducts or AmxAttentionProducts.
template <class T, class Products = NoAttentionProducts>
class TileAttention {
public:
    // `value_dim`: how many dimensions of the values are summed, a multiple of LANES, where keys are the values too; 0: all. `has_codes`:
    // whether caches may have codes.
    TileAttention(int64_t group, int64_t head_dim, int64_t value_dim = 0, bool has_codes = false)
        : group_(group), dim_(head_dim), value_dim_(value_dim ? value_dim : head_dim) {
        const int64_t rows = queries_per_tile(group) * group + Products::MOST_PADDING;
        query_.reserve(rows * head_dim);
        output_.reserve(rows * head_dim);
        scores_.reserve(rows * TILE_KEYS);
        weights_.reserve(rows * TILE_KEYS);
        base_.reserve(rows);
        sums_.reserve(rows * LANES);
        products_.reserve(round_up(value_dim_, LANES * Lane<T>::VALUES));
        if (value_dim) shared_values_.reserve(TILE_KEYS * round_up(value_dim, LANES * Lane<T>::VALUES));
        // Here, since no memory may run out once the pool's threads have started.
        if (has_codes) decoded_.reserve(head_dim, !value_dim);
    }

    // Attention of one tile. `next` is what this thread probably computes after it, or null. `query` is of the whole step,
    // [tokens, heads, head_dim]. Calls put(token, number, values) for each group of LANES numbers of the tokens' outputs
    // [heads * value_dim].
    template <class F>
    void run(TaskClaim& task_claim, const Cache& cache, const Sequences& sequences, const Tile& tile, const Tile* next,
             const AttentionRule& rule, const T* query, F&& put) {
        const int64_t queries = tile.last - tile.first, heads = tile.last_head - tile.first_head;
        const int64_t token = sequences.query_starts[tile.sequence] + tile.first;
        const int64_t rows = queries * group_, stride = cache.num_kv_heads * group_ * dim_;
        // Heads that share keys are computed together. Otherwise each one's rows are padded to whole blocks of them.
        const int64_t together = cache.is_shared() ? heads : 1, num_rows = together * rows;
        has_codes_ = cache.has_codes();
        block_size_ = has_codes_ ? DecodedTile<T>::BLOCK_SIZE : cache.block_size;
        uses_products_ = Products::suit(dim_, block_size_);
        if (uses_products_) products_.configure(num_rows);
        const int64_t apart = uses_products_ ? Products::padded(num_rows) : num_rows;  // from one head to the next
        const auto place = [&](int64_t head) { return head / together * apart + head % together * rows; };
        const int64_t first_head = token * stride + tile.first_head * group_ * dim_;
        value_stride_ = dim_;
        if (cache.is_shared()) {
            value_stride_ = round_up(value_dim_, LANES * V);
        }
        // Rows of the work space: head by head, query by query, by the heads of a group
        for (int64_t head = 0; head < heads; ++head)
            for (int64_t q = 0; q < queries; ++q)
                copy_numbers(query + first_head + q * stride + head * group_ * dim_, group_ * dim_,
                             &query_[(place(head) + q * group_) * dim_]);
        const int64_t all_rows = heads / together * apart;
        std::fill_n(output_.data(), all_rows * dim_, 0.0f);
        std::fill_n(sums_.data(), all_rows * LANES, 0.0f);
        std::fill_n(base_.data(), all_rows, -INFINITY);
        if (rule.sinks)
            for (int64_t head = 0; head < heads; ++head)
                for (int64_t i = 0; i < rows; ++i)
                    begin_with_sink(place(head) + i, rule.sinks[(tile.first_head + head) * group_ + i % group_]);

        const KeyRange keys = key_range(sequences, tile, rule);
        // Nothing is prefetched after the last tile of a phase: the same keys again.
        const Tile& after = next ? *next : tile;
        const KeyRange keys_after = key_range(sequences, after, rule);
        const RowLayout layout{together, rows, apart};
        const auto run_stored = [&]<class Stored>() {
            const auto after_tile = locate<Stored>(cache, keys_after, after.first_head, keys_after.first_tile());
            return is_memory_bound(rows) ? run_tiles<true>(task_claim, cache, keys, tile, after_tile, layout, rule)
                                         : run_tiles<false>(task_claim, cache, keys, tile, after_tile, layout, rule);
        };
        if (!(has_codes_ ? run_stored.template operator()<CodeTile>() : run_stored.template operator()<KeyTile<T>>())) return;
        task_claim.write_all([&] {
            for (int64_t head = 0; head < heads; ++head)
                for (int64_t i = 0; i < rows; ++i) {
                    const int64_t row = place(head) + i, number = (tile.first_head + head) * group_ + i % group_;
                    const float sum = total(load_floats(&sums_[row * LANES]));
                    for (int64_t d = 0; d < value_dim_; d += LANES)
                        put(token + i / group_, number * value_dim_ + d, load_floats(&output_[row * dim_ + d]) / sum);
                }
        });
    }

    // For all that follows. Groups have one head; caches are not shared and have no codes.
    void add_by_distance(const DistanceScores& distances) { distances_ = distances; }

    // To be called when all tiles of a phase are done.
    void end_phase() { products_.restore(); }

private:
    using Row = typename Lane<T>::Row;
    static constexpr int V = Lane<T>::VALUES;
    static constexpr int GROUPS = TILE_KEYS / LANES;
    static constexpr int VECTOR_LANES = sizeof(Vector) / sizeof(float), VECTORS = LANES / VECTOR_LANES;
    static constexpr float HEADROOM = 8.0f;
    static constexpr int64_t DECODE_HEARTBEAT_TILES = 8;  // tiles, a few microseconds' work

    // The keys that some query of a tile sees, begin to end - 1, the blocks of their sequence, and the position of the first query.
    struct KeyRange {
        int64_t begin, end, position;
        const int32_t* table;

        int64_t first_tile() const { return begin / TILE_KEYS * TILE_KEYS; }
    };

    static KeyRange key_range(const Sequences& sequences, const Tile& tile, const AttentionRule& rule) {
        const int32_t* starts = sequences.query_starts + tile.sequence;
        const int64_t context_len = sequences.context_lens[tile.sequence];
        const int64_t position = context_len - (starts[1] - starts[0]) + tile.first;
        int64_t end = position + tile.last - tile.first;
        if (rule.bidirectional) end = rule.window ? std::min(context_len, end + rule.window - 1) : context_len;
        return {rule.window ? std::max<int64_t>(0, position - rule.window + 1) : 0, end, position,
                sequences.block_tables + tile.sequence * sequences.max_blocks};
    }

    // `together` heads are computed at a time, each with so many rows; these are `apart` from the next ones.
    struct RowLayout {
        int64_t together, rows, apart;
    };

    // Every tile of keys of the range, unless another thread takes over. With FETCH, the next one is prefetched while one
    // is computed: at last `after`, the first of what this thread probably computes after it. `Stored`: KeyTile<T> or CodeTile.
    template <bool FETCH, class Stored>
    bool run_tiles(TaskClaim& task_claim, const Cache& cache, const KeyRange& keys, const Tile& tile, const Stored& after,
                   const RowLayout& layout, const AttentionRule& rule) {
        constexpr bool HAS_CODES = std::is_same_v<Stored, CodeTile>;
        // Codes are prefetched while others are decoded.
        constexpr bool FETCH_NUMBERS = FETCH && !HAS_CODES;
        const int64_t heads = tile.last_head - tile.first_head, first = keys.first_tile();
        const int64_t together = layout.together, num_rows = together * layout.rows, queries = layout.rows / group_;
        Stored next = locate<Stored>(cache, keys, tile.first_head, first);
        for (int64_t start = first; start < keys.end; start += TILE_KEYS) {
            for (int64_t head = 0; head < heads; head += together) {
                const int64_t top = head / together * layout.apart;
                const Stored stored = next;
                if (head + together < heads)
                    next = locate<Stored>(cache, keys, tile.first_head + head + 1, start);
                else if (start + TILE_KEYS < keys.end)
                    next = locate<Stored>(cache, keys, tile.first_head, start + TILE_KEYS);
                else
                    next = after;
                if constexpr (HAS_CODES) {
                    key_tile_ = next_key_tile_ = decoded_.template decode<FETCH>(stored, next, cache);
                } else {
                    key_tile_ = stored;
                    next_key_tile_ = next;
                }
                if (uses_products_)
                    products_.template score<FETCH_NUMBERS>(key_tile_, next_key_tile_, &query_[top * dim_], dim_, block_size_, num_rows,
                                                            &scores_[top * TILE_KEYS]);
                else
                    for_rows(num_rows, [&]<int R>(int64_t row) { compute_scores<R, FETCH_NUMBERS>(top + row); });
                if (FETCH_NUMBERS && uses_products_ && !cache.is_shared()) Products::prefetch_first_values(next_key_tile_);
                if (distances_.of_heads)
                    for (int64_t q = 0; q < queries; ++q) add_distances(top + q, tile.first_head + head, start - keys.position - q);
                for (int64_t row = top; row < top + num_rows; row += layout.rows)
                    for (int64_t q = 0; q < queries; ++q) softmax_tile<HAS_CODES>(row + q * group_, start, keys.position + q, rule);
                // Shared values are the keys, which are prefetched already.
                if (cache.is_shared()) {
                    copy_shared_values();
                    gather_rows<false>(top, num_rows);
                } else {
                    gather_rows<FETCH_NUMBERS>(top, num_rows);
                }
            }
            // More often would slow a decode down.
            if ((!FETCH || start / TILE_KEYS % DECODE_HEARTBEAT_TILES == DECODE_HEARTBEAT_TILES - 1) && !task_claim.heartbeat()) return false;
        }
        return true;
    }

    // The tile at `start`. Blocks beyond the range are not looked up.
    template <class Stored>
    static Stored locate(const Cache& cache, const KeyRange& range, int64_t head, int64_t start) {
        constexpr bool HAS_CODES = std::is_same_v<Stored, CodeTile>;
        using Number = std::conditional_t<HAS_CODES, int8_t, T>;
        Stored key_tile;
        key_tile.first_key = std::max<int64_t>(0, range.begin - start);
        key_tile.num_keys = std::min<int64_t>(TILE_KEYS, range.end - start);
        key_tile.first_group = key_tile.first_key / LANES;
        key_tile.num_groups = ceil_div(key_tile.num_keys, LANES);
        // One division for all halves: divisions take long.
        const int64_t oldest = std::max(start, range.begin / LANES * LANES), newest = (range.end - 1) / 8 * 8;
        int64_t index = oldest / cache.block_size, offset = oldest - index * cache.block_size;
        for (int64_t half = 0; half < TILE_KEYS / 8; ++half) {
            const int64_t key = start + half * 8;
            if (key > oldest && key <= newest && (offset += 8) == cache.block_size) {
                offset = 0;
                ++index;
            }
            const int64_t block = range.table[index];
            key_tile.keys[half] = cache.keys<Number>(block, head) + offset * V;
            key_tile.values[half] = cache.values<Number>(block, head) + offset * cache.head_dim;
            if constexpr (HAS_CODES) {
                key_tile.key_scales[half] = cache.key_scales(block, head) + offset;
                key_tile.value_scales[half] = cache.value_scales(block, head) + offset;
            }
        }
        return key_tile;
    }

    template <class F>
    static void for_rows(int64_t rows, F&& body) {
        for (int64_t row = 0; row < rows; row += ROWS_WIDE)
            with_count<ROWS_WIDE>(std::min<int64_t>(ROWS_WIDE, rows - row), [&]<int R>() {
                body.template operator()<R>(row);
            });
    }

    template <int R, bool FETCH>
    void compute_scores(int64_t row) {
        if (block_size_ == LANES / 2) {
            for (int64_t g = key_tile_.first_group; g < key_tile_.num_groups; ++g) score_groups<R, 1, true, FETCH>(row, g);
        } else if (key_tile_.first_group == 0 && key_tile_.num_groups == GROUPS) {
            constexpr int G = groups_beside(R);
            for (int64_t g = 0; g < GROUPS; g += G) score_groups<R, G, false, FETCH>(row, g);
        } else {
            for (int64_t g = key_tile_.first_group; g < key_tile_.num_groups; ++g) score_groups<R, 1, false, FETCH>(row, g);
        }
    }

    // With HALVES, a group of keys spans two blocks. All loops over the sums are unrolled, here and in gather_keys(): else GCC
    // also stores each sum in each step, which takes longer than the products. As a part of a larger function, the loop over the
    // steps would have fewer registers.
    template <int R, int G, bool HALVES, bool FETCH>
    [[gnu::noinline]] void score_groups(int64_t row, int64_t first) {
        constexpr int N = G * VECTORS;
        FloatVector sums[R][N] = {};
        const int64_t stride = dim_, step = V * block_size_, num_steps = dim_ / V;
        const Row* rows[] = {&query_[row * stride], &query_[(row + 3) * stride]};  // as in multiply_half_panel()
        const T *from[2 * G], *next[2 * G];
        std::copy_n(key_tile_.keys + 2 * first, 2 * G, from);
        std::copy_n(next_key_tile_.keys + 2 * first, 2 * G, next);
        const auto load_keys = [&](int n, int place) {
            if constexpr (VECTORS == 2)
                return Lane<T>::load_at_place(HALVES ? from[n] : from[n / 2 * 2] + n % 2 * (LANES / 2 * V), place);
            else if constexpr (HALVES)
                return load_words(from[2 * n], from[2 * n + 1]);
            else
                return Lane<T>::load_at_place(from[2 * n], place);
        };
        for (int64_t i = 0; i < num_steps; ++i) {
            add_products<R, N>([&](int r) { return rows[r / 3] + r % 3 * stride; }, load_keys, sums);
            for (auto& base : rows) base += V;
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) {
                from[2 * g] += step;
                if constexpr (HALVES) from[2 * g + 1] += step;
                if constexpr (FETCH) {
                    __builtin_prefetch(next[2 * g], 0, 2);
                    next[2 * g] += step;
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) store(&scores_[(row + r) * TILE_KEYS + first * LANES + n * VECTOR_LANES], sums[r][n]);
    }

    // To the scores of a row, whose query has the tile's first key at this distance.
    void add_distances(int64_t row, int64_t head, int64_t distance) {
        const float* added = distances_.of_heads + head * distances_.stride + distances_.own_place + distance;
        for (int64_t g = key_tile_.first_group; g < key_tile_.num_groups; ++g) {
            float* to = &scores_[row * TILE_KEYS + g * LANES];
            store(to, load_floats(to) + load_floats(added + g * LANES));
        }
    }

    // Writes the values of a tile, which are its keys, in the order of values, where gather() then finds them. Those beyond
    // the context are never read.
    void copy_shared_values() {
        const int64_t num_rows = dim_ / V;
        for (int64_t g = key_tile_.first_group; g < key_tile_.num_groups; ++g) {
            const T *low = key_tile_.keys[2 * g], *high = key_tile_.keys[2 * g + 1];
            for (int64_t first = 0; first * V < value_stride_; first += LANES) {
                Words words[LANES];
                for (int64_t i = 0; i < LANES; ++i) {
                    const int64_t at = std::min(first + i, num_rows - 1) * V * block_size_;
                    words[i] = load_words(low + at, high + at);
                }
                transpose(words);
                T* to = &shared_values_[g * LANES * value_stride_ + first * V * V];
                for (int64_t key = 0; key < LANES; key += V) put_values(to + key * value_stride_, words + key);
            }
        }
        for (int64_t half = 0; half < TILE_KEYS / 8; ++half) key_tile_.values[half] = &shared_values_[half * 8 * value_stride_];
    }

    // Sixteen dimensions of one key, or 32 of two: the words of a key hold two dimensions, those of values two keys.
    static void put_values(T* to, const Words* keys) {
        if constexpr (V == 1) {
            store(to, keys[0]);
        } else {
            const Words even = (keys[0] & 0xffffu) | (keys[1] << 16), odd = (keys[0] >> 16) | (keys[1] & 0xffff0000u);
            store(to, interleave_low(even, odd));
            store(to + LANES * V, interleave_high(even, odd));
        }
    }

    // Online softmax of a query's rows, in powers of two: scores become weights. The output so far is rescaled only where a score
    // exceeds the base by more than HEADROOM: until then weights may exceed 1, without loss of precision.
    template <bool HAS_CODES>
    void softmax_tile(int64_t row, int64_t start, int64_t position, const AttentionRule& rule) {
        const int64_t last = key_tile_.num_keys - 1;
        int64_t newest = std::min(position - start, last);
        if (rule.bidirectional) newest = rule.window ? std::min(position + rule.window - 1 - start, last) : last;
        const int64_t oldest = rule.window ? std::max(key_tile_.first_key, position - rule.window + 1 - start) : 0;
        if (newest == TILE_KEYS - 1 && oldest <= 0)
            for (int64_t i = 0; i < group_; ++i) softmax_keys<HAS_CODES, true>(row + i, newest, oldest, rule);
        else
            for (int64_t i = 0; i < group_; ++i) softmax_keys<HAS_CODES, false>(row + i, newest, oldest, rule);
    }

    // With ALL, the row sees every key of the tile.
    template <bool HAS_CODES, bool ALL>
    void softmax_keys(int64_t row, int64_t newest, int64_t oldest, const AttentionRule& rule) {
        const float* scores = &scores_[row * TILE_KEYS];
        const Floats hidden = splat(-INFINITY);
        Floats key_tile[GROUPS], top = hidden;
        for (int g = 0; g < GROUPS; ++g) {
            if (!ALL && (g < key_tile_.first_group || g >= key_tile_.num_groups)) {
                key_tile[g] = hidden;
                continue;
            }
            Floats x = load_floats(scores + g * LANES);
            if constexpr (HAS_CODES) x *= load_floats(decoded_.key_scales + g * LANES);
            if (rule.soft_cap != 0.0f) {
                // tanh(y) = 1 - 2 / (1 + e**2y)
                const Floats e = exp2(x * rule.scale * (2.0f * LOG2_E / rule.soft_cap));
                x = 1.0f - 2.0f / (1.0f + e);
            }
            if (!ALL) {
                const Ints key = LANE + g * LANES;
                x = select((key <= static_cast<int32_t>(newest)) & (key >= static_cast<int32_t>(oldest)), x, hidden);
            }
            key_tile[g] = x;
            top = select(x > top, x, top);
        }
        // Scores times this are exponents of 2. It is above 0, so the largest score has the largest exponent.
        const float factor = LOG2_E * (rule.soft_cap != 0.0f ? rule.soft_cap : rule.scale);
        if (any_above(top * factor, base_[row] + HEADROOM)) rebase(row, largest(top) * factor);
        // A row may see nothing yet.
        const float base = base_[row] == -INFINITY ? 0.0f : base_[row];
        Floats added = load_floats(&sums_[row * LANES]);
        for (int g = 0; g < GROUPS; ++g) {
            const Floats weight = exp2(multiply_add(key_tile[g], splat(factor), splat(-base)));
            added += weight;
            const Floats stored = HAS_CODES ? weight * load_floats(decoded_.value_scales + g * LANES) : weight;
            store_floats(&weights_[row * TILE_KEYS + g * LANES], stored);
        }
        store(&sums_[row * LANES], added);
    }

    // A row whose only score so far is that of a sink. One of minus infinity has no weight.
    void begin_with_sink(int64_t row, float sink) {
        base_[row] = sink * LOG2_E;
        sums_[row * LANES] = base_[row] == -INFINITY ? 0.0f : 1.0f;
    }

    void rebase(int64_t row, float base) {
        const float before = std::exchange(base_[row], base);
        if (before == -INFINITY) return;  // nothing is summed yet
        const float decay = exp2(splat(before - base))[0];
        store(&sums_[row * LANES], load_floats(&sums_[row * LANES]) * decay);
        for (int64_t d = 0; d < value_dim_; d += LANES)
            store(&output_[row * dim_ + d], load_floats(&output_[row * dim_ + d]) * decay);
    }

    template <bool FETCH>
    void gather_rows(int64_t top, int64_t num_rows) {
        if (uses_products_)
            products_.template gather<FETCH>(key_tile_, next_key_tile_, &weights_[top * TILE_KEYS], num_rows, value_dim_, value_stride_,
                                             &output_[top * dim_], dim_);
        else
            for_rows(num_rows, [&]<int R>(int64_t row) { gather<R, FETCH>(top + row); });
    }

    template <int R, bool FETCH>
    void gather(int64_t row) {
        constexpr int MOST = groups_beside(R);
        for (int64_t d = 0; d < value_dim_; d += MOST * LANES)
            with_count<MOST>(std::min<int64_t>(MOST, (value_dim_ - d) / LANES), [&]<int G>() {
                gather_part<R, G, FETCH>(row, d);
            });
    }

    // Adds the products of R rows and N vectors.
    template <int R, int N>
    [[gnu::always_inline]] static void add_products(auto&& row_at, auto&& load_at_place, FloatVector (&sums)[R][N]) {
        using Factor = Lane<Row>;
        const auto broadcast = [&](int r, int place) { return first_vector(Factor::broadcast(row_at(r) + place)); };
#pragma GCC unroll 2
        for (int place = 0; place < V / Factor::VALUES; ++place) {
            // Of pairs, the fewer of rows and vectors are kept in registers beside the sums.
            if constexpr (VECTORS == 2 && R > 1 && R < N) {
                Vector x[R];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) x[r] = broadcast(r, place);
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) {
                    const Vector part = load_at_place(n, place);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sums[r][n] = Factor::multiply_add(x[r], part, sums[r][n]);
                }
            } else {
                Vector parts[N];
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) parts[n] = load_at_place(n, place);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const Vector x = broadcast(r, place);
#pragma GCC unroll 8
                    for (int n = 0; n < N; ++n) sums[r][n] = Factor::multiply_add(x, parts[n], sums[r][n]);
                }
            }
        }
    }

    static void copy_numbers(const T* from, int64_t count, Row* to) {
        if constexpr (std::is_same_v<Row, T>)
            std::copy_n(from, count, to);
        else
            for (int64_t i = 0; i < count; i += LANES) store(to + i, load_floats(from + i));
    }

    // Values beyond the context are not read: they may be NaN, and zero times NaN is NaN. A pair of keys of which one is not seen has
    // a call of its own, which masks that key.
    template <int R, int G, bool FETCH>
    void gather_part(int64_t row, int64_t d) {
        const int64_t first = round_up(key_tile_.first_key, V), last = key_tile_.num_keys / V * V;
        if constexpr (V > 1)
            if (key_tile_.first_key < first) gather_keys<R, G, true, FETCH>(row, d, first - V, first);
        if (first < last) gather_keys<R, G, false, FETCH>(row, d, first, last);
        if constexpr (V > 1)
            if (first <= last && last < key_tile_.num_keys) gather_keys<R, G, true, FETCH>(row, d, last, last + V);
    }

    // Of keys first to last - 1. With EDGE, some of them are not seen.
    template <int R, int G, bool EDGE, bool FETCH>
    [[gnu::noinline]] void gather_keys(int64_t row, int64_t d, int64_t first, int64_t last) {
        constexpr int N = G * VECTORS;
        FloatVector sums[R][N];
        float* output = &output_[row * dim_ + d];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[r][n] = load<FloatVector>(output + r * dim_ + n * VECTOR_LANES);
        const Row* weights = &weights_[row * TILE_KEYS];
        for (int64_t key = first; key < last; key += V) {
            const auto place_of = [&](const KeyTile<T>& tile) { return tile.values[key / 8] + key % 8 * value_stride_ + d * V; };
            const T* from = place_of(key_tile_);
            if constexpr (FETCH) {
                const T* next = place_of(next_key_tile_);
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g) __builtin_prefetch(next + g * LANES * V, 0, 2);
            }
            uint32_t seen = ~0u;
            if (EDGE && key + 1 >= key_tile_.num_keys) seen &= 0x0000ffffu;
            if (EDGE && key < key_tile_.first_key) seen &= 0xffff0000u;
            const auto load_values = [&](int n, int place) {
                const T* values = from + n * VECTOR_LANES * V;
                return EDGE ? Lane<T>::at_place(load<Vector>(values) & seen, place) : Lane<T>::load_at_place(values, place);
            };
            add_products<R, N>([&](int r) { return weights + key + r * TILE_KEYS; }, load_values, sums);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) store(output + r * dim_ + n * VECTOR_LANES, sums[r][n]);
    }

    const int64_t group_, dim_, value_dim_;
    int64_t block_size_ = 0;
    int64_t value_stride_ = 0;  // from one key's values to the next one's
    Buffer<Row> query_, weights_;
    Buffer<T> shared_values_;  // [TILE_KEYS, value_stride], of the tile, where keys are the values too
    Buffer<float> output_, scores_, base_, sums_;
    KeyTile<T> key_tile_, next_key_tile_;
    DecodedTile<T> decoded_;
    bool has_codes_ = false;      // of the cache of the tile of queries
    bool uses_products_ = false;  // for the tile of queries
    DistanceScores distances_;
    Products products_;
};

// To be called by all threads of the pool: attention of every query of the step. `attention` is the thread's own.
template <class T, class Products, class F>
void attend(ThreadPool& pool, TileAttention<T, Products>& attention, const Cache& cache, const Sequences& sequences,
            const std::vector<Tile>& tiles, const AttentionRule& rule, const T* query, F&& put) {
    pool.parallel_for_tasks(static_cast<int64_t>(tiles.size()), [&](int64_t i, TaskClaim& task_claim) {
        // Tiles are handed out in order, so a thread's next one is probably at the distance of the number of threads.
        const size_t next = static_cast<size_t>(i) + pool.size();
        attention.run(task_claim, cache, sequences, tiles[i], next < tiles.size() ? &tiles[next] : nullptr, rule, query, put);
    });
    attention.end_phase();
}

}  // namespace quire
