// Products of a step's activations with packed weights, in panels of 32 outputs.
//
// Each output is one sum over the inputs in their order, for any number of rows: a token's bits do not depend on the
// rest of its step.
#pragma once

#include <algorithm>
#include <type_traits>

#include "codes.h"
#include "grouped_bytes.h"
#include "matrix.h"
#include "nibbles.h"
#include "simd.h"
#include "thread_pool.h"

namespace quire {

constexpr int64_t PAGE = 4096;
// How far ahead a stream is prefetched.
constexpr int PREFETCH_BYTES = 8192;

template <class T>
inline int64_t panel_steps(const Matrix& m) {
    return ceil_div(m.inputs, Lane<T>::VALUES);
}

// Of a panel as it is stored, where rows have elements T.
template <class T>
inline int64_t panel_bytes(const Matrix& m) {
    if (m.has_nibbles()) return nibble_panel_bytes(m);
    if (m.has_grouped_bytes()) return byte_panel_bytes(m);
    return panel_steps<T>(m) * Lane<T>::VALUES * PANEL * (m.format == Format::INT8 ? 1 : sizeof(T));
}

// The elements of scratch memory in which a panel of so many inputs is expanded.
inline int64_t expanded_size(int64_t inputs) { return round_up(inputs, IN_WORD) * PANEL; }

// Sums of M rows and one panel. Prefetches `ahead`, which is multiplied next, LINES lines for each step.
template <class T, int M, int LINES>
[[gnu::always_inline]] inline void multiply_panel(
    const T* rows, int64_t stride, const T* panel, int64_t steps, const void* ahead, float* totals) {
    constexpr int V = Lane<T>::VALUES;
    const char* next = static_cast<const char*>(ahead);
    Floats sums[M][2] = {};
    // Rows are addressed from every fifth one: with one address for each, or one for all, GCC keeps some of 12 or 13 rows'
    // addresses in vector registers, and the product takes 7 % longer.
    const T* bases[] = {rows, rows + 5 * stride, rows + 10 * stride};
    for (int64_t k = 0; k < steps; ++k, panel += PANEL * V, next += LINES * LINE) {
        const Words left = load<Words>(panel), right = load<Words>(panel + LANES * V);
        for (int line = 0; line < LINES; ++line) __builtin_prefetch(next + line * LINE, 0, 2);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const Words x = Lane<T>::broadcast(bases[m / 5] + m % 5 * stride);
            sums[m][0] = Lane<T>::multiply_add(x, left, sums[m][0]);
            sums[m][1] = Lane<T>::multiply_add(x, right, sums[m][1]);
        }
        for (auto& base : bases) base += V;
    }
    // Unrolled, as all that reads or writes the sums: else GCC keeps them in memory.
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        store(totals + m * PANEL, sums[m][0]);
        store(totals + m * PANEL + LANES, sums[m][1]);
    }
}

// The rows of a tile. More than ROWS rows are multiplied as floats: bfloat16 is taken apart once for all panels, or once for each
// where panels are expanded and a piece has several tiles.
template <class T>
struct TileRows {
    int64_t count;
    const T* data;
    int64_t stride;
    const float* numbers = nullptr;
    int64_t number_stride = 0;

    // `scratch` as VectorFactors::scratch_size() says.
    TileRows(int64_t count, const T* data, int64_t stride, [[maybe_unused]] int64_t inputs, [[maybe_unused]] T* scratch)
        : count(count), data(data), stride(stride) {
        if constexpr (std::is_same_v<T, float>) {
            numbers = data;
            number_stride = stride;
        } else if constexpr (HAVE_NUMBERS) {
            if (count <= ROWS) return;
            auto* to = reinterpret_cast<float*>(scratch + expanded_size(inputs));
            numbers = to;
            number_stride = number_stride_of(inputs);
            for (int64_t row = 0; row < count; ++row)
                for (int64_t i = 0; i < inputs; i += LANES) store(to + row * number_stride + i, load_floats(data + row * stride + i));
        }
    }

    // The elements of scratch memory for numbers.
    static int64_t number_size(int64_t inputs) {
        return HAVE_NUMBERS ? Lane<T>::MOST_ROWS * number_stride_of(inputs) * static_cast<int64_t>(sizeof(float) / sizeof(T)) : 0;
    }

private:
    static constexpr bool HAVE_NUMBERS = std::is_same_v<T, BFloat16> && Lane<T>::MOST_ROWS > ROWS;
    // Not a multiple of a page, see VectorFactors::stride().
    static int64_t number_stride_of(int64_t inputs) { return round_up(inputs, PANEL) + LANES; }
};

#ifdef QUIRE_PAIRS
// As multiply_panel, of half a panel: an output's sum has the same bits.
template <class T, int M, int LINES>
[[gnu::always_inline]] inline void multiply_half_panel(
    const float* numbers, int64_t stride, const T* half, int64_t steps, const void* ahead, float* totals) {
    constexpr int V = Lane<T>::VALUES;
    const char* next = static_cast<const char*>(ahead);
    Floats sums[M] = {};
    const float* bases[] = {numbers, numbers + 3 * stride};
    for (int64_t k = 0; k < steps; ++k, half += PANEL * V, next += LINES * LINE) {
        const Words weights = load<Words>(half);
        for (int line = 0; line < LINES; ++line) __builtin_prefetch(next + line * LINE, 0, 2);
#pragma GCC unroll 2
        for (int place = 0; place < V; ++place) {
            const Words part = Lane<T>::at_place(weights, place);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m)
                sums[m] = multiply_add(Lane<float>::broadcast(bases[m / 3] + m % 3 * stride + place), part, sums[m]);
        }
        for (auto& base : bases) base += V;
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) store(totals + m * PANEL, sums[m]);
}
#endif

// As multiply_panel, of rows of codes.
template <int M, int LINES>
[[gnu::always_inline]] inline void multiply_codes(
    const Code* rows, int64_t stride, const Matrix& m, const Code* panel, const void* ahead, float* totals) {
    constexpr int V = Lane<Code>::VALUES;
    const int64_t size = code_group_of(m);
    const char* next = static_cast<const char*>(ahead);
    for (int i = 0; i < M * PANEL; i += LANES) store(totals + i, Floats{});
    const Code* groups = code_groups(m, rows);
    for (int64_t first = 0; first < m.inputs; first += size, groups += sizeof(CodeGroup)) {
        Ints sums[M][2];
        for (int i = 0; i < M; ++i) sums[i][0] = sums[i][1] = start_of(groups + i * stride);
        const Code* codes = rows + first;
        const int64_t steps = ceil_div(std::min(size, m.inputs - first), V);
        for (int64_t k = 0; k < steps; ++k, panel += PANEL * V, codes += V, next += LINES * LINE) {
            const Words left = load<Words>(panel), right = load<Words>(panel + LANES * V);
            for (int line = 0; line < LINES; ++line) __builtin_prefetch(next + line * LINE, 0, 2);
#pragma GCC unroll 16
            for (int i = 0; i < M; ++i) {
                const Words x = Lane<Code>::broadcast(codes + i * stride);
                sums[i][0] = multiply_bytes(left, x, sums[i][0]);
                sums[i][1] = multiply_bytes(right, x, sums[i][1]);
            }
        }
        asm("" : "+r"(totals));  // else GCC keeps totals in registers, and has too few for sums
        for (int i = 0; i < M; ++i)
            for (int side = 0; side < 2; ++side) add_scaled(totals + i * PANEL + side * LANES, sums[i][side], scale_of(groups + i * stride));
    }
}

// Sums [count, PANEL] of the rows of a tile and one panel, which is expanded where its matrix says so. One function for all
// products: it is large.
template <class T, int LINES>
[[gnu::noinline]] inline void multiply_panel(
    const TileRows<T>& tile, const Matrix& matrix, const void* panel, const void* ahead, float* totals) {
    const T* rows = tile.data;
    const int64_t stride = tile.stride;
    const auto count = static_cast<int>(tile.count);
    if constexpr (std::is_same_v<T, Code>) {
        const auto* bytes = static_cast<const uint8_t*>(panel);
        const auto multiply_groups = [&]<bool MINIMUMS>() {
            if (matrix.has_nibbles())
                with_count<ROWS_OF_NIBBLES>(count, [&]<int M>() {
                    multiply_nibbles<M, LINES, MINIMUMS>(rows, stride, matrix, bytes, ahead, totals);
                });
            else
                with_count<ROWS_OF_BYTES>(count, [&]<int M>() {
                    multiply_grouped_bytes<M, LINES, MINIMUMS>(rows, stride, matrix, bytes, ahead, totals);
                });
        };
        if (matrix.format != Format::W8A8)
            return matrix.has_minimums ? multiply_groups.template operator()<true>() : multiply_groups.template operator()<false>();
    }
    with_count<Lane<T>::MOST_ROWS>(count, [&]<int M>() {
        if constexpr (std::is_same_v<T, Code>) {
            multiply_codes<M, LINES>(rows, stride, matrix, static_cast<const Code*>(panel), ahead, totals);
        } else if constexpr (M > ROWS) {
            const auto* left = static_cast<const T*>(panel);
            const int64_t steps = panel_steps<T>(matrix);
            const void* ahead_of_right = static_cast<const char*>(ahead) + steps * LINE;
            multiply_half_panel<T, M, 1>(tile.numbers, tile.number_stride, left, steps, ahead, totals);
            multiply_half_panel<T, M, LINES - 1>(tile.numbers, tile.number_stride, left + LANES * Lane<T>::VALUES, steps, ahead_of_right,
                                                 totals + LANES);
        } else {
            multiply_panel<T, M, LINES>(rows, stride, static_cast<const T*>(panel), panel_steps<T>(matrix), ahead, totals);
        }
    });
}

// Calls finish(row, panel, left, right) for the results of `count` rows, of their sums [count, PANEL].
template <class F>
[[gnu::always_inline]] inline void finish_panel(
    const Matrix& matrix, int64_t panel, int64_t first_row, int64_t count, const float* sums, F&& finish) {
    const float* scales = matrix.scales ? matrix.scales + panel * PANEL : nullptr;
    const float* bias = matrix.bias ? matrix.bias + panel * PANEL : nullptr;
    for (int64_t m = 0; m < count; ++m, sums += PANEL) {
        Floats left = load_floats(sums), right = load_floats(sums + LANES);
        if (scales) {
            left *= load_floats(scales);
            right *= load_floats(scales + LANES);
        }
        if (bias) {
            left += load_floats(bias);
            right += load_floats(bias + LANES);
        }
        finish(first_row + m, panel, left, right);
    }
}

// Stores the results of a panel that are outputs of the matrix, not padding, in a row of them.
inline void put_outputs(const Matrix& matrix, int64_t panel, Floats left, Floats right, float* row) {
    const int64_t first = panel * PANEL, count = matrix.outputs - first;
    if (count >= PANEL) {
        store(row + first, left);
        store(row + first + LANES, right);
        return;
    }
    for (int64_t i = 0; i < count; ++i) row[first + i] = i < LANES ? left[i] : right[i - LANES];
}

// The numbers of a panel in T: those of int8 have no scale yet, so they are exact.
template <class T>
inline void expand_panel(const Matrix& m, const void* panel, T* to) {
    if (m.has_nibbles()) return expand_nibbles(m, static_cast<const uint8_t*>(panel), to);
    if (m.has_grouped_bytes()) return expand_grouped_bytes(m, static_cast<const uint8_t*>(panel), to);
    const auto* codes = static_cast<const int8_t*>(panel);
    for (int64_t i = 0, count = panel_bytes<T>(m); i < count; i += LANES) store_exact(to + i, floats_of(codes + i));
}

// Rows that are multiplied by a matrix. In tiles, what AMX loads together is in neighbouring lines: of each 16 rows the first 32 columns,
// row by row, then the next 32.
template <class T>
struct FactorRows {
    static constexpr int64_t TILE_ROWS = 16, TILE_COLUMNS = 32;

    T* data;
    int64_t stride;  // the elements of a row, with padding
    bool in_tiles = false;

    // Of LANES columns.
    T* at(int64_t row, int64_t column) const {
        if (!in_tiles) return data + row * stride + column;
        return data + row / TILE_ROWS * TILE_ROWS * stride + column / TILE_COLUMNS * tile_step() + row % TILE_ROWS * TILE_COLUMNS +
               column % TILE_COLUMNS;
    }
    // From a row of a tile to the next one, and from a tile of a row to the next one.
    int64_t row_step() const { return in_tiles ? TILE_COLUMNS : stride; }
    int64_t tile_step() const { return in_tiles ? TILE_COLUMNS * TILE_ROWS : TILE_COLUMNS; }

    // From this row and column on, where a tile begins.
    FactorRows from(int64_t row, int64_t column) const { return {at(row, column), stride, in_tiles}; }
};

// A part of a product, which a thread computes in units: a panel with a tile of rows each, by AmxFactors with two rows of it.
struct Piece {
    int64_t first_panel, last_panel, first_row, last_row;
    int64_t tile_rows;  // the last tile may have fewer
    // Panels that the thread probably multiplies next, which are prefetched.
    const void* next = nullptr;
    const void* next_end = nullptr;

    int64_t num_panels() const { return last_panel - first_panel; }
    int64_t num_tiles() const { return ceil_div(last_row - first_row, tile_rows); }
    int64_t num_units() const { return num_panels() * num_tiles(); }
};

// The pieces of a product: `across` ranges of panels times `down` blocks of tiles of rows, of about the same size. A
// thread reads a piece's panels once for each tile, which stays in its first-level cache; the piece's weights stay in the
// second-level cache. It may have `least_panels` even where these are larger.
//
// With several tiles, where the ranges can be dealt out evenly, those of a thread are neighbours while threads keep in step: two threads
// seldom write neighbouring cache lines of a row then.
struct TaskGrid {
    int64_t num_panels, across;
    int64_t num_tiles, down;
    int64_t rows;  // of a tile, the last one's may be fewer
    int threads;

    TaskGrid(int64_t num_rows, int64_t tile_rows, int64_t all_panels, int64_t panel_bytes, int threads,
             int64_t least_panels = 1)
        : num_panels(all_panels), rows(tile_rows), threads(threads) {
        const int64_t wanted = TASKS_PER_THREAD * threads, most = std::max(least_panels, TASK_BYTES / panel_bytes);
        num_tiles = std::max<int64_t>(1, ceil_div(num_rows, rows));
        // With more tiles it pays more to keep one for many panels.
        const int64_t panels = num_tiles < TILES ? std::clamp<int64_t>(num_panels / wanted, 1, most) : most;
        across = std::min(num_panels, round_up(ceil_div(num_panels, panels), threads));
        down = std::clamp<int64_t>(num_tiles / TILES, 1, ceil_div(wanted, across));
    }

    int64_t num_tasks() const { return across * down; }
    Piece piece(int64_t task, int64_t num_rows) const {
        const int64_t range = range_of(task), block = task / across;
        return {first_panel(range), first_panel(range + 1), first_row(block), std::min(num_rows, first_row(block + 1)), rows};
    }
    // The same, with what a thread probably multiplies after it: pieces are handed out in order, so its next one is probably at the
    // distance of the number of threads, perhaps in the next matrix, which follows in memory.
    Piece piece_with_next(int64_t task, int64_t num_rows, const void* panels, int64_t panel_bytes) const {
        const int64_t index = task % across + threads, next = index < across ? range_of(index) : index;
        Piece piece = this->piece(task, num_rows);
        piece.next = static_cast<const char*>(panels) + first_panel(next) * panel_bytes;
        piece.next_end = static_cast<const char*>(panels) + first_panel(next + 1) * panel_bytes;
        return piece;
    }
    int64_t range_of(int64_t task) const {
        const int64_t index = task % across;
        // One tile takes as long as its panels are read: what is read next is known in this order, also in the next matrix.
        if (num_tiles == 1 || across % threads) return index;
        return index % threads * (across / threads) + index / threads;
    }
    int64_t first_panel(int64_t range) const { return begin(range, num_panels, across); }
    int64_t first_row(int64_t block) const { return begin(block, num_tiles, down) * rows; }

    // The size of a part, where `count` items are cut into `parts` that differ by at most one, larger ones first.
    static int64_t begin(int64_t part, int64_t count, int64_t parts) {
        return part * (count / parts) + std::min(part, count % parts);
    }

    // Enough pieces for threads to end at about the same time, even if one is delayed.
    static constexpr int64_t TASKS_PER_THREAD = 4;
    static constexpr int64_t TASK_BYTES = 256 * 1024;
    // Smaller pieces would load weights too often.
    static constexpr int64_t TILES = 8;
};

// Rows of T in a tile, where `num_rows` are cut into tiles of about the same size.
template <class T>
inline int64_t rows_of_tile(const Matrix& matrix, int64_t num_rows) {
    const int64_t most = matrix.format == Format::W4A8           ? ROWS_OF_NIBBLES
                         : matrix.format == Format::GROUPED_W8A8 ? ROWS_OF_BYTES
                                                                 : Lane<T>::MOST_ROWS;
    const auto rows_with = [&](int64_t limit) { return ceil_div(num_rows, std::max<int64_t>(1, ceil_div(num_rows, limit))); };
    int64_t rows = rows_with(most);
    // Four rows of half a panel have too few sums for the latency of an addition. One tile of them waits for memory anyway.
    if (most > ROWS && rows == ROWS + 1 && (num_rows > rows || matrix.is_expanded())) rows = rows_with(ROWS);
    return std::max<int64_t>(1, rows);
}

// Computes the units of a piece from `units` on: for each of their rows and panels, calls finish(row, panel, left sums, right
// sums). `scratch` is this thread's own, see VectorFactors::scratch_size(). Returns whether the piece is still this thread's.
template <class T, class F>
inline bool multiply_piece(const Matrix& matrix, const Piece& piece, int64_t units, const T* rows, int64_t stride, T* scratch,
                           TaskClaim& task_claim, F&& finish) {
    const int64_t num_tiles = piece.num_tiles(), num_panels = piece.num_panels(), tile_rows = piece.tile_rows;
    const char* panels = static_cast<const char*>(matrix.panels);
    const int64_t bytes = panel_bytes<T>(matrix);
    const auto rows_of_unit = [&](int64_t first) {
        return TileRows<T>(std::min(tile_rows, piece.last_row - first), rows + first * stride, stride, matrix.inputs, scratch);
    };
    // Computes one unit. Returns whether the piece is still this thread's.
    const auto multiply_unit = [&]<int LINES>(const TileRows<T>& tile, int64_t first, int64_t p, const void* panel, const void* ahead) {
        alignas(LINE) float sums[Lane<T>::MOST_ROWS * PANEL];
        multiply_panel<T, LINES>(tile, matrix, panel, ahead, sums);
        return task_claim.write([&] { finish_panel(matrix, p, first, tile.count, sums, finish); });
    };
    if constexpr (!std::is_same_v<T, Code>) {
        if (matrix.is_expanded()) {
            const TileRows<T> first_tile = rows_of_unit(piece.first_row);
            for (int64_t p = piece.first_panel + units / num_tiles; p < piece.last_panel; ++p, units = 0) {
                const char* packed = panels + p * bytes;
                expand_panel(matrix, packed, scratch);
                for (int64_t row = piece.first_row + units % num_tiles * tile_rows; row < piece.last_row; row += tile_rows) {
                    const TileRows<T> tile = num_tiles == 1 ? first_tile : rows_of_unit(row);
                    if (!multiply_unit.template operator()<1>(tile, row, p, scratch, packed + bytes)) return false;
                }
            }
            return true;
        }
    }
    if (num_tiles == 1) {
        const TileRows<T> tile = rows_of_unit(piece.first_row);
        // The only use of the panel, which takes less time than loading it. Half panels have every second line each, and the processor
        // loads neighbouring lines together: during both halves only another panel can be read.
        for (int64_t p = piece.first_panel + units; p < piece.last_panel; ++p) {
            const char* panel = panels + p * bytes;
            const void* after = p + 1 < piece.last_panel || !piece.next ? panel + bytes : piece.next;
            const void* ahead = tile.numbers && tile.count > ROWS ? after : panel + PREFETCH_BYTES;
            if (!multiply_unit.template operator()<2>(tile, piece.first_row, p, panel, ahead)) return false;
        }
        return true;
    }
    // About half a panel is prefetched with each.
    const int64_t prefetched = (matrix.has_nibbles() ? ceil_div(matrix.inputs, IN_WORD) : panel_steps<T>(matrix)) * LINE;
    const auto* next = static_cast<const char*>(piece.next);
    for (int64_t row = piece.first_row + units / num_panels * tile_rows; row < piece.last_row; row += tile_rows, units = 0) {
        const TileRows<T> tile = rows_of_unit(row);
        for (int64_t p = piece.first_panel + units % num_panels; p < piece.last_panel; ++p) {
            const bool turns = p == piece.last_panel - 1 && row + tile_rows < piece.last_row;
            const bool fetches = !turns && next < piece.next_end;
            const void* ahead = turns     ? static_cast<const void*>(rows + (row + tile_rows) * stride)
                                : fetches ? next
                                          : static_cast<const void*>(rows + row * stride);
            if (!multiply_unit.template operator()<1>(tile, row, p, panels + p * bytes, ahead)) return false;
            if (fetches) next += prefetched;
        }
    }
    return true;
}

// For all threads of the thread pool: calls body(piece, claim) for all rows and panels of a product, whose panels have so many
// bytes.
template <class F>
inline void for_pieces(ThreadPool& pool, const Matrix& matrix, const TaskGrid& grid, int64_t num_rows, int64_t panel_bytes, F&& body) {
    pool.parallel_for_tasks(num_rows ? grid.num_tasks() : 0, [&](int64_t i, TaskClaim& task_claim) {
        body(grid.piece_with_next(i, num_rows, matrix.panels, panel_bytes), task_claim);
    });
}

// For all threads of the thread pool: as multiply_piece(), for all rows and panels.
template <class T, class F>
inline void multiply(
    ThreadPool& pool, const Matrix& matrix, const T* rows, int64_t num_rows, int64_t stride, T* scratch, F&& finish) {
    const int64_t bytes = panel_bytes<T>(matrix), num_all = ceil_div(matrix.outputs, PANEL);
    // What the caches hold of a panel.
    const int64_t held = matrix.is_expanded() ? expanded_size(matrix.inputs) * static_cast<int64_t>(sizeof(T)) : bytes;
    const TaskGrid grid(num_rows, rows_of_tile<T>(matrix, num_rows), num_all, held, pool.size());
    for_pieces(pool, matrix, grid, num_rows, bytes, [&](const Piece& piece, TaskClaim& task_claim) {
        multiply_piece(matrix, piece, task_claim.next(), rows, stride, scratch, task_claim, finish);
    });
}

// For all threads of the pool: rows [num_rows, stride] in the order of a matrix's inputs.
template <class T>
inline void put_in_order(
    ThreadPool& pool, const Matrix& matrix, const T* rows, int64_t num_rows, int64_t stride, T* ordered) {
    pool.parallel_for_ranges(num_rows, [&](int64_t row) {
        const T* from = rows + row * stride;
        T* to = ordered + row * stride;
        for (int64_t i = 0; i < matrix.inputs; ++i) to[i] = from[matrix.order[i]];
        std::copy(from + matrix.inputs, from + stride, to + matrix.inputs);
    });
}

// Products of factors T in vectors; as AmxFactors.
template <class T>
struct VectorFactors {
    using Element = T;
    using Value = T;
    struct Registers {
        Registers() {}  // none are reserved
    };
    static constexpr int64_t ROWS = 1;
    static constexpr bool TAKES_TILES = false;  // whether rows may be in tiles

    // Rows at a distance of a page are all in the same set of a first-level cache, which holds fewer of them than a tile has:
    // the product takes 1.3 times as long.
    static int64_t stride(int64_t columns) {
        const int64_t padded = round_up(columns, PANEL);
        return padded == 0 || padded * static_cast<int64_t>(sizeof(T)) % PAGE ? padded : padded + PANEL;
    }
    static int64_t width(int64_t columns) { return round_up(columns, PANEL); }
    static int64_t scratch_size(int64_t inputs) { return expanded_size(inputs) + TileRows<T>::number_size(inputs); }
    static void put(T* row, int64_t column, Floats v) { store_floats(row + column, v); }
    static int64_t tile_rows(const Matrix& matrix, int64_t num_rows) { return rows_of_tile<T>(matrix, num_rows); }
    static int64_t num_units(const Matrix&, const Piece& piece) { return piece.num_units(); }

    template <class F>
    static bool multiply_piece(const Matrix& matrix, const Piece& piece, int64_t units, const FactorRows<const T>& rows, T* scratch,
                               TaskClaim& task_claim, F&& finish) {
        return quire::multiply_piece(matrix, piece, units, rows.data, rows.stride, scratch, task_claim, finish);
    }

    template <class F>
    static void multiply(ThreadPool& pool, const Matrix& matrix, const FactorRows<const T>& rows, int64_t num_rows, T* scratch,
                         F&& finish) {
        quire::multiply(pool, matrix, rows.data, num_rows, rows.stride, scratch, finish);
    }

    // Sums [PANEL] of one row and one panel of a matrix in PLAIN, by the calling thread: with the bits of a product of many rows.
    static constexpr bool MULTIPLIES_SINGLE_PANELS = true;
    static void multiply_single_panel(const Matrix& matrix, const T* row, int64_t panel, T* scratch, float* sums) {
        const char* numbers = static_cast<const char*>(matrix.panels) + panel * panel_bytes<T>(matrix);
        multiply_panel<T, 2>(TileRows<T>(1, row, 0, matrix.inputs, scratch), matrix, numbers, numbers + PREFETCH_BYTES, sums);
    }
};

}  // namespace quire
