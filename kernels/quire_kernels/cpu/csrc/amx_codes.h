// Products in 8 bits (W8A8) by the tile registers of AMX: 32 rows and 32 outputs at a time. Sums of a group are exact, and all other
// operations are those of multiply_codes() in linear.h: the bits are the same, so the number of rows decides which one computes.
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

// The same, by registers in the shapes of products where these are faster.
struct AmxCodes {
    static constexpr int64_t ROWS = 2 * AmxRegisters::ROWS;
    // Fewer rows take no longer in vectors: the panels' loads take as long.
    static constexpr int64_t LEAST_ROWS = 12;
    // Pieces show by the rows of their tiles how they are computed.
    static_assert(ROWS > Lane<Code>::MOST_ROWS);

    static bool suit(const Matrix& matrix, int64_t num_rows) {
        return matrix.format == Format::W8A8 && matrix.inputs % DEPTH == 0 && num_rows >= LEAST_ROWS;
    }
    static int64_t tile_rows(const Matrix& matrix, int64_t num_rows) {
        return suit(matrix, num_rows) ? ROWS : VectorCodes::tile_rows(matrix, num_rows);
    }

    template <class F>
    static bool multiply_piece(const Matrix& matrix, const Piece& piece, int64_t units, const Code* rows, int64_t stride,
                               TaskClaim& task_claim, F&& finish) {
        if (piece.tile_rows != ROWS) return VectorCodes::multiply_piece(matrix, piece, units, rows, stride, task_claim, finish);
        const char* panels = static_cast<const char*>(matrix.panels);
        const int64_t bytes = panel_bytes<Code>(matrix), num_tiles = piece.num_tiles(), num_panels = piece.num_panels();
        int64_t p = piece.first_panel + units % num_panels;
        // While all tiles of a panel are multiplied, the lines of another one are prefetched.
        const int64_t lines = ceil_div(bytes / LINE, num_tiles * ceil_div(matrix.inputs, code_group_of(matrix)) * CALLS);
        PrefetchStream ahead{static_cast<const char*>(piece.next), static_cast<const char*>(piece.next_end), lines};
        if (num_tiles == 1) ahead = stream_of(piece, panels, bytes, p, PREFETCH_BYTES, lines);
        for (int64_t row = piece.first_row + units / num_panels * ROWS; row < piece.last_row; row += ROWS, p = piece.first_panel)
            for (; p < piece.last_panel; ++p) {
                alignas(LINE) float totals[ROWS * PANEL];
                const int64_t count = std::min(ROWS, piece.last_row - row);
                multiply_panel(rows + row * stride, stride, matrix, reinterpret_cast<const Code*>(panels + p * bytes), count, totals, ahead);
                if (!task_claim.write([&] { finish_panel(matrix, p, row, count, totals, finish); })) return false;
            }
        return true;
    }

private:
    static constexpr int64_t DEPTH = 64;
    static constexpr int64_t CALLS = 9;  // of prefetch() for a group, at LEAST_ROWS

    // Sums [32, PANEL] of `count` rows and one panel; those of rows beyond are undefined.
    static void multiply_panel(const Code* rows, int64_t stride, const Matrix& m, const Code* panel, int64_t count, float* totals,
                               PrefetchStream& ahead) {
        alignas(LINE) int32_t sums[2][ROWS * PANEL];
        const int64_t size = code_group_of(m), num_groups = ceil_div(m.inputs, size);
        const Code* groups = code_groups(m, rows);
        // While the sums of one group are added to the totals, the processor multiplies the next one.
        for (int64_t g = 0; g <= num_groups; ++g) {
            if (g < num_groups)
                multiply_group(rows + g * size, stride, panel + g * size * PANEL, std::min(size, m.inputs - g * size), count, sums[g % 2], ahead);
            if (g == 1) add_group<true>(groups, stride, count, sums[0], totals, ahead);
            if (g > 1) add_group<false>(groups + (g - 1) * sizeof(CodeGroup), stride, count, sums[(g - 1) % 2], totals, ahead);
        }
    }

    static void multiply_group(const Code* rows, int64_t stride, const Code* panel, int64_t inputs, int64_t count, int32_t* sums, PrefetchStream& ahead) {
        constexpr int64_t HALF = ROWS / 2, PANEL_LINE = Lane<Code>::VALUES * PANEL, SUMS_BYTES = PANEL * sizeof(int32_t);
        const bool is_full = count > HALF;
        asm volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < inputs; k += DEPTH, rows += DEPTH, panel += DEPTH * PANEL) {
            _tile_stream_loadd(6, panel, PANEL_LINE);
            ahead.prefetch();
            _tile_loadd(4, rows, stride);
            _tile_dpbsud(0, 4, 6);
            ahead.prefetch();
            if (is_full) {
                _tile_loadd(5, rows + HALF * stride, stride);
                _tile_dpbsud(2, 5, 6);
            }
            _tile_stream_loadd(7, panel + PANEL_LINE / 2, PANEL_LINE);
            _tile_dpbsud(1, 4, 7);
            if (is_full) _tile_dpbsud(3, 5, 7);
            ahead.prefetch();
        }
        _tile_stored(0, sums, SUMS_BYTES);
        _tile_stored(1, sums + LANES, SUMS_BYTES);
        if (is_full) {
            _tile_stored(2, sums + HALF * PANEL, SUMS_BYTES);
            _tile_stored(3, sums + HALF * PANEL + LANES, SUMS_BYTES);
        }
        asm volatile("" ::: "memory");
    }

    // Adds the sums of a group to the totals, which begin as zeros with IS_FIRST.
    template <bool IS_FIRST>
    static void add_group(const Code* groups, int64_t stride, int64_t count, const int32_t* sums, float* totals, PrefetchStream& ahead) {
        for (int64_t i = 0; i < count; ++i, groups += stride, sums += PANEL, totals += PANEL) {
            const CodeGroup group = load<CodeGroup>(groups);
            const Ints offset = splat(CODE_OFFSET * group.sum);
            for (int side = 0; side < PANEL; side += LANES) {
                const Floats before = IS_FIRST ? Floats{} : load_floats(totals + side);
                store(totals + side, multiply_add(to_floats(load<Ints>(sums + side) - offset), splat(group.scale), before));
            }
            if (i % 4 == 0) ahead.prefetch();
        }
    }
};

#endif

// The products of W8A8 that go with a kind of product.
template <class Product>
struct CodesOf {
    using Type = VectorCodes;
};

#ifdef QUIRE_AMX
template <>
struct CodesOf<AmxFactors<1>> {
    using Type = AmxCodes;
};
#endif

// For all threads of the pool: as multiply() of linear.h, of rows that are rounded to codes for a matrix that takes them.
template <class Product, class T, class F>
inline void multiply_in_codes(
    ThreadPool& pool, const Matrix& matrix, CodeRows& code_rows, const T* rows, int64_t num_rows, int64_t stride, F&& finish) {
    using Codes = typename CodesOf<Product>::Type;
    code_rows.set_all(pool, num_rows, rows, stride, matrix);
    const int64_t bytes = panel_bytes<Code>(matrix);
    const TaskGrid grid(num_rows, Codes::tile_rows(matrix, num_rows), ceil_div(matrix.outputs, PANEL), bytes, pool.size());
    for_pieces(pool, matrix, grid, num_rows, bytes, [&](const Piece& piece, TaskClaim& task_claim) {
        Codes::multiply_piece(matrix, piece, task_claim.next(), code_rows.row(0), code_rows.stride(), task_claim, finish);
    });
}

}  // namespace quire
