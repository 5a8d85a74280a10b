// Products of activations in 8 bits by the tile registers of AMX: 32 rows and 32 outputs at a time. Sums of a group are exact, and all
// other operations are those of vectors, in linear.h and the files of formats: the bits are the same, so the number of rows decides
// which one computes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx.h"
#include "codes.h"
#include "linear.h"
#include "simd.h"

namespace quire {

// Products of rows in codes, in vectors.
struct VectorCodes {
    static int64_t tile_rows(const Matrix& matrix, int64_t num_rows) { return rows_of_tile<Code>(matrix, num_rows); }

    // As multiply_piece() of linear.h.
    template <class F>
    static bool multiply_piece(const Matrix& matrix, const Piece& piece, int64_t units, const Code* rows, int64_t stride,
                               TaskClaim& task_claim, F&& finish) {
        return quire::multiply_piece(matrix, piece, units, rows, stride, static_cast<Code*>(nullptr), task_claim, finish);
    }
};

#ifdef QUIRE_AMX

// Sums [32, PANEL] of 32 rows and 32 outputs, in four registers; those of rows from `count` on are undefined. Rows and lines of codes
// of a panel are read `depth` inputs at a time, as the registers are shaped.
struct AmxSums {
    static constexpr int64_t HALF = AmxRegisters::ROWS, ROWS = 2 * HALF, SIZE = ROWS * PANEL;
    // Fewer rows take no longer in vectors: the panels' loads take as long.
    static constexpr int64_t LEAST_ROWS = 12;

    // Of prefetch() for the products of a group, and then for each fourth row whose sums are added.
    static int64_t calls(int64_t inputs, int64_t depth) { return 3 * ceil_div(inputs, depth) + LEAST_ROWS / 4; }

    const Code* rows;
    int64_t stride, inputs, depth, count;

    void multiply(const Code* lines, PrefetchStream& ahead) const {
        constexpr int64_t PANEL_LINE = Lane<Code>::VALUES * PANEL;
        const bool is_full = count > HALF;
        const Code* from = rows;
        asm volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < inputs; k += depth, from += depth, lines += depth * PANEL) {
            _tile_stream_loadd(6, lines, PANEL_LINE);
            ahead.prefetch();
            _tile_loadd(4, from, stride);
            _tile_dpbsud(0, 4, 6);
            ahead.prefetch();
            if (is_full) {
                _tile_loadd(5, from + HALF * stride, stride);
                _tile_dpbsud(2, 5, 6);
            }
            _tile_stream_loadd(7, lines + PANEL_LINE / 2, PANEL_LINE);
            _tile_dpbsud(1, 4, 7);
            if (is_full) _tile_dpbsud(3, 5, 7);
            ahead.prefetch();
        }
        asm volatile("" ::: "memory");
    }

    void store(int32_t* sums) const {
        constexpr int64_t BYTES = PANEL * sizeof(int32_t);
        asm volatile("" ::: "memory");
        _tile_stored(0, sums, BYTES);
        _tile_stored(1, sums + LANES, BYTES);
        if (count > HALF) {
            _tile_stored(2, sums + HALF * PANEL, BYTES);
            _tile_stored(3, sums + HALF * PANEL + LANES, BYTES);
        }
        asm volatile("" ::: "memory");
    }
};

// W8A8.
struct AmxWholePanels {
    static constexpr int64_t DEPTH = 64;

    static bool suit(const Matrix& m) { return m.format == Format::W8A8 && m.inputs % DEPTH == 0; }
    explicit AmxWholePanels(const Matrix& m) : matrix(m), groups(ceil_div(m.inputs, code_group_of(m))) {}

    // Sums [32, PANEL] of `count` rows and one panel; those of rows beyond are undefined.
    void multiply(const Code* rows, int64_t stride, const char* panel, int64_t count, float* totals, PrefetchStream& ahead) const {
        alignas(LINE) int32_t sums[AmxSums::SIZE];
        const int64_t size = code_group_of(matrix);
        const Code* row_groups = code_groups(matrix, rows);
        // While the sums of one group are added to the totals, the processor multiplies the next one.
        for (int64_t g = 0; g <= groups; ++g) {
            const AmxSums group{rows + g * size, stride, std::min(size, matrix.inputs - g * size), DEPTH, count};
            if (g < groups) group.multiply(reinterpret_cast<const Code*>(panel) + g * size * PANEL, ahead);
            if (g == 1) add_group<true>(row_groups, stride, count, sums, totals, ahead);
            if (g > 1) add_group<false>(row_groups + (g - 1) * sizeof(CodeGroup), stride, count, sums, totals, ahead);
            if (g < groups) group.store(sums);
        }
    }

    // Of prefetch() for a group, with the fewest rows.
    int64_t calls() const { return AmxSums::calls(code_group_of(matrix), DEPTH); }

    const Matrix& matrix;
    const int64_t groups;

private:
    // Adds the sums of a group to the totals, which begin as zeros with IS_FIRST.
    template <bool IS_FIRST>
    static void add_group(const Code* groups, int64_t stride, int64_t count, const int32_t* sums, float* totals, PrefetchStream& ahead) {
        for (int64_t i = 0; i < count; ++i, groups += stride, sums += PANEL, totals += PANEL) {
            const Floats scale = scale_of(groups);
            const Ints start = start_of(groups);
            for (int side = 0; side < PANEL; side += LANES) {
                const Floats before = IS_FIRST ? Floats{} : load_floats(totals + side);
                store(totals + side, multiply_add(to_floats(load<Ints>(sums + side) + start), scale, before));
            }
            if (i % 4 == 0) ahead.prefetch();
        }
    }
};

// W4A8 and GROUPED_W8A8. A group's inputs are the depth of the registers, up to 64: products of fewer inputs take as long, but what
// is done with the sums of a group takes longer in any case. With groups of 16 inputs vectors are faster: their sums need not be
// stored and loaded again. Codes of 4 bits are unpacked, a group at a time.
class AmxGroupedPanels {
public:
    static bool suit(const Matrix& m) {
        return (m.format == Format::W4A8 || m.format == Format::GROUPED_W8A8) && m.group >= 32 && m.inputs % m.group == 0;
    }
    explicit AmxGroupedPanels(const Matrix& m)
        : matrix(m), groups(m.inputs / m.group), depth_(std::min<int64_t>(m.group, 64)), head_(m.has_nibbles() ? GROUP_HEAD : byte_group_head(m)),
          group_bytes_(m.has_nibbles() ? nibble_group_bytes(m.group) : byte_group_bytes(m)) {
        if (has_product_shape()) return;
        const auto depth = static_cast<uint16_t>(depth_);
        const auto lines = static_cast<uint8_t>(depth / Lane<Code>::VALUES);
        AmxRegisters::load({16, 16, 16, 16, 16, 16, lines, lines}, {64, 64, 64, 64, depth, depth, 64, 64});
    }
    AmxGroupedPanels(const AmxGroupedPanels&) = delete;
    ~AmxGroupedPanels() {
        if (!has_product_shape()) AmxRegisters::load_products();
    }

    // As that of AmxWholePanels.
    void multiply(const Code* rows, int64_t stride, const char* panel, int64_t count, float* totals, PrefetchStream& ahead) const {
        const auto* bytes = reinterpret_cast<const uint8_t*>(panel);
        if (matrix.has_nibbles())
            matrix.has_minimums ? multiply_groups<true, true>(rows, stride, bytes, count, totals, ahead)
                                : multiply_groups<true, false>(rows, stride, bytes, count, totals, ahead);
        else
            matrix.has_minimums ? multiply_groups<false, true>(rows, stride, bytes, count, totals, ahead)
                                : multiply_groups<false, false>(rows, stride, bytes, count, totals, ahead);
    }

    int64_t calls() const { return AmxSums::calls(matrix.group, depth_); }

    const Matrix& matrix;
    const int64_t groups;

private:
    static constexpr int64_t MOST_INPUTS = 128;  // of a group

    // Whether the registers have the shape that they need already.
    bool has_product_shape() const { return depth_ == 64; }

    template <bool NIBBLES, bool MINIMUMS>
    void multiply_groups(const Code* rows, int64_t stride, const uint8_t* panel, int64_t count, float* totals, PrefetchStream& ahead) const {
        alignas(LINE) int32_t sums[AmxSums::SIZE];
        alignas(LINE) Code unpacked[2][MOST_INPUTS * PANEL];
        const int64_t size = matrix.group;
        const Code* row_groups = code_groups(matrix, rows);
        for (int64_t i = 0; i < count * PANEL; i += LANES) store(totals + i, Floats{});
        if constexpr (NIBBLES) unpack(panel, unpacked[0]);
        // While the sums of one group are added to the totals, the processor multiplies the next one. Lines that are loaded into
        // registers were written a group before.
        for (int64_t g = 0; g <= groups; ++g, panel += group_bytes_) {
            const AmxSums group{rows + g * size, stride, size, depth_, count};
            if (g < groups) group.multiply(NIBBLES ? unpacked[g % 2] : reinterpret_cast<const Code*>(panel + head_), ahead);
            if constexpr (NIBBLES)
                if (g + 1 < groups) unpack(panel + group_bytes_, unpacked[(g + 1) % 2]);
            if (g > 0)
                add_group<NIBBLES, MINIMUMS>(panel - group_bytes_, row_groups + (g - 1) * sizeof(CodeGroup), stride, count, sums, totals, ahead);
            if (g < groups) group.store(sums);
        }
    }

    // Lines of four inputs of a side, from those of eight.
    void unpack(const uint8_t* group, Code* to) const {
        const uint8_t* words = group + GROUP_HEAD;
        for (int64_t k = 0; k < matrix.group; k += IN_WORD, words += 2 * LINE, to += IN_WORD * PANEL) {
            const Words left = load<Words>(words), right = load<Words>(words + LINE);
            store(to, left & LOW_NIBBLES);
            store(to + LINE, right & LOW_NIBBLES);
            store(to + 2 * LINE, (left >> 4) & LOW_NIBBLES);
            store(to + 3 * LINE, (right >> 4) & LOW_NIBBLES);
        }
    }

    // Adds the sums of a group to the totals, as multiply_nibbles() and multiply_grouped_bytes() do.
    template <bool NIBBLES, bool MINIMUMS>
    static void add_group(const uint8_t* group, const Code* row_groups, int64_t stride, int64_t count, const int32_t* sums, float* totals,
                          PrefetchStream& ahead) {
        const auto* head = reinterpret_cast<const uint16_t*>(group);
        Floats scales[2], zeros[2] = {};
        for (int side = 0; side < 2; ++side) {
            scales[side] = load_float16(head + side * LANES);
            if constexpr (NIBBLES || MINIMUMS) zeros[side] = load_float16(head + PANEL + side * LANES);
        }
        for (int64_t i = 0; i < count; ++i, row_groups += stride, sums += PANEL, totals += PANEL) {
            const Floats factor = scale_of(row_groups);
            const Floats codes = sum_of(row_groups);
            for (int side = 0; side < 2; ++side) {
                float* total = totals + side * LANES;
                Ints sum = load<Ints>(sums + side * LANES);
                if constexpr (!NIBBLES) sum += start_of(row_groups);
                if constexpr (MINIMUMS)
                    add_with_minimum(total, sum, scales[side], zeros[side], codes, factor);
                else if constexpr (NIBBLES)
                    add_scaled(total, sum, zeros[side], codes, scales[side], factor);
                else
                    add_scaled(total, sum, scales[side], factor);
            }
            if (i % 4 == 0) ahead.prefetch();
        }
    }

    int64_t depth_, head_, group_bytes_;
};

// Products of rows in codes, by AMX where it is faster.
struct AmxCodes {
    static constexpr int64_t ROWS = AmxSums::ROWS;
    // Pieces show by the rows of their tiles how they are computed.
    static_assert(ROWS > Lane<Code>::MOST_ROWS);

    static bool suit(const Matrix& matrix, int64_t num_rows) {
        return num_rows >= AmxSums::LEAST_ROWS && (AmxWholePanels::suit(matrix) || AmxGroupedPanels::suit(matrix));
    }
    static int64_t tile_rows(const Matrix& matrix, int64_t num_rows) {
        return suit(matrix, num_rows) ? ROWS : VectorCodes::tile_rows(matrix, num_rows);
    }

    template <class F>
    static bool multiply_piece(const Matrix& matrix, const Piece& piece, int64_t units, const Code* rows, int64_t stride,
                               TaskClaim& task_claim, F&& finish) {
        if (piece.tile_rows != ROWS) return VectorCodes::multiply_piece(matrix, piece, units, rows, stride, task_claim, finish);
        if (matrix.format == Format::W8A8) return multiply_panels(AmxWholePanels(matrix), piece, units, rows, stride, task_claim, finish);
        return multiply_panels(AmxGroupedPanels(matrix), piece, units, rows, stride, task_claim, finish);
    }

private:
    template <class Panels, class F>
    static bool multiply_panels(const Panels& product, const Piece& piece, int64_t units, const Code* rows, int64_t stride,
                                TaskClaim& task_claim, F&& finish) {
        const Matrix& matrix = product.matrix;
        const char* panels = static_cast<const char*>(matrix.panels);
        const int64_t bytes = panel_bytes<Code>(matrix), num_tiles = piece.num_tiles(), num_panels = piece.num_panels();
        int64_t p = piece.first_panel + units % num_panels;
        // While all tiles of a panel are multiplied, the lines of another one are prefetched.
        const int64_t lines = ceil_div(bytes / LINE, num_tiles * product.groups * product.calls());
        PrefetchStream ahead{static_cast<const char*>(piece.next), static_cast<const char*>(piece.next_end), lines};
        if (num_tiles == 1) ahead = stream_of(piece, panels, bytes, p, PREFETCH_BYTES, lines);
        for (int64_t row = piece.first_row + units / num_panels * ROWS; row < piece.last_row; row += ROWS, p = piece.first_panel)
            for (; p < piece.last_panel; ++p) {
                alignas(LINE) float totals[AmxSums::SIZE];
                const int64_t count = std::min(ROWS, piece.last_row - row);
                product.multiply(rows + row * stride, stride, panels + p * bytes, count, totals, ahead);
                if (!task_claim.write([&] { finish_panel(matrix, p, row, count, totals, finish); })) return false;
            }
        return true;
    }
};

#endif

// The products in codes that go with a kind of product.
template <class Product>
struct CodesOf {
    using Type = VectorCodes;
};

#ifdef QUIRE_AMX
template <int PARTS>
struct CodesOf<AmxFactors<PARTS>> {
    using Type = AmxCodes;
};
#endif

// For all threads of the pool: as multiply() of linear.h, of rows in codes for a matrix that takes them.
template <class Product, class F>
inline void multiply_code_rows(ThreadPool& pool, const Matrix& matrix, const CodeRows& code_rows, int64_t num_rows, F&& finish) {
    using Codes = typename CodesOf<Product>::Type;
    const int64_t bytes = panel_bytes<Code>(matrix);
    const TaskGrid grid(num_rows, Codes::tile_rows(matrix, num_rows), ceil_div(matrix.outputs, PANEL), bytes, pool.size());
    for_pieces(pool, matrix, grid, num_rows, bytes, [&](const Piece& piece, TaskClaim& task_claim) {
        Codes::multiply_piece(matrix, piece, task_claim.next(), code_rows.row(0), code_rows.stride(), task_claim, finish);
    });
}

// The same, of rows that are rounded to codes first.
template <class Product, class T, class F>
inline void multiply_in_codes(
    ThreadPool& pool, const Matrix& matrix, CodeRows& code_rows, const T* rows, int64_t num_rows, int64_t stride, F&& finish) {
    code_rows.set_all(pool, num_rows, rows, stride, matrix);
    multiply_code_rows<Product>(pool, matrix, code_rows, num_rows, finish);
}

}  // namespace quire
