// Products by the tile registers of AMX: 32 rows and 32 outputs at a time, of factors in bfloat16.
//
// A float32 factor is the sum of two of bfloat16: high + low, 16 bits of its 24. A product is then three: of high and high,
// high and low, low and high, and its relative error is about 2**-16. As in linear.h, a row's bits do not depend on others.
#pragma once

#include <type_traits>

#include "linear.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#define QUIRE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

#ifdef QUIRE_AMX

// Whether the system lets this process use the registers. Without its permission an instruction ends the process.
inline bool may_use_amx() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return allowed;
}

// The registers' shapes, for the thread that holds it: all of 16 rows of 64 bytes.
class AmxRegisters {
public:
    AmxRegisters() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        std::fill_n(shapes.row_bytes, 8, uint16_t{64});
        std::fill_n(shapes.rows, 8, uint8_t{16});
        _tile_loadconfig(&shapes);
    }
    AmxRegisters(const AmxRegisters&) = delete;
    ~AmxRegisters() { _tile_release(); }
};

// Factors of PARTS bfloat16 each. Inputs are in blocks of 32: of each block first the high parts, then the low ones; in rows
// as in panels. Rows are a whole number of blocks, zeros beyond the last input, and may be read up to a multiple of 32.
template <int PARTS>
struct AmxFactors {
    using Element = BFloat16;
    using Value = std::conditional_t<PARTS == 1, BFloat16, float>;  // what is rounded to such factors
    using Registers = AmxRegisters;
    static constexpr int64_t ROWS = 32, DEPTH = 32;
    // Of the panels of a piece, which stay in the second-level cache for all its rows.
    static constexpr int64_t TASK_BYTES = 1024 * 1024;

    static int64_t width(int64_t columns) { return round_up(columns, DEPTH) * PARTS; }
    static int64_t scratch_size(int64_t inputs) { return expanded_size(round_up(inputs, DEPTH)); }

    static void put(Element* row, int64_t column, Floats v) {
        Element* to = row + column / DEPTH * DEPTH * PARTS + column % DEPTH;
        const Halves high = round_to_bfloat16(v);
        store(to, high);
        if constexpr (PARTS == 2) store_floats(to + DEPTH, v - floats_of(high));
    }

    static int64_t tile_rows(const Matrix&, int64_t) { return ROWS; }

    // As multiply_piece() of linear.h.
    template <class F>
    static bool multiply_piece(const Matrix& matrix, const Piece& piece, int64_t units, const Element* rows, int64_t stride,
                               Element* scratch, TaskClaim& task_claim, F&& finish) {
        const char* panels = static_cast<const char*>(matrix.panels);
        const int64_t bytes = panel_bytes<Element>(matrix), num_tiles = piece.num_tiles(), num_panels = piece.num_panels();
        // Computes one unit. Returns whether the piece is still this thread's.
        const auto tile = [&]<bool FETCH>(int64_t row, int64_t p, const Element* panel) {
            alignas(LINE) float sums[ROWS * PANEL];
            const int64_t count = std::min(ROWS, piece.last_row - row);
            multiply_panel<FETCH>(rows + row * stride, stride, panel, matrix.inputs, count, sums, PANEL);
            return task_claim.write([&] { finish_panel(matrix, p, row, count, sums, finish); });
        };
        if (matrix.is_expanded()) {
            for (int64_t p = piece.first_panel + units / num_tiles; p < piece.last_panel; ++p, units = 0) {
                expand_panel(matrix, panels + p * bytes, scratch);
                for (int64_t row = piece.first_row + units % num_tiles * ROWS; row < piece.last_row; row += ROWS)
                    if (!tile.template operator()<false>(row, p, scratch)) return false;
            }
            return true;
        }
        for (int64_t row = piece.first_row + units / num_panels * ROWS; row < piece.last_row; row += ROWS, units = 0)
            for (int64_t p = piece.first_panel + units % num_panels; p < piece.last_panel; ++p) {
                const auto* panel = reinterpret_cast<const Element*>(panels + p * bytes);
                if (!(num_tiles == 1 ? tile.template operator()<true>(row, p, panel) : tile.template operator()<false>(row, p, panel)))
                    return false;
            }
        return true;
    }

    // As multiply() of linear.h.
    template <class F>
    static void multiply(ThreadPool& pool, const Matrix& matrix, const Element* rows, int64_t num_rows, int64_t stride,
                         Element* scratch, F&& finish) {
        const int64_t panel_bytes = matrix.inputs * PANEL * sizeof(Element), num_all = ceil_div(matrix.outputs, PANEL);
        const TaskGrid grid(num_rows, ROWS, num_all, panel_bytes, pool.size(), TASK_BYTES);
        pool.parallel_for_tasks(num_rows ? grid.num_tasks() : 0, [&](int64_t i, TaskClaim& task_claim) {
            multiply_piece(matrix, grid.piece(i, num_rows), task_claim.next(), rows, stride, scratch, task_claim, finish);
        });
    }

    // Sums [32, PANEL] of `count` rows and one panel, at a stride; those of rows beyond are undefined. With FETCH, which is
    // for panels that are used once, what follows is prefetched.
    template <bool FETCH>
    static void multiply_panel(const Element* rows, int64_t stride, const Element* panel, int64_t inputs, int64_t count,
                               float* sums, int64_t sums_stride) {
        constexpr int64_t BLOCK = DEPTH * PANEL, HALF = ROWS / 2;
        const int64_t row_bytes = stride * sizeof(Element), line = Lane<Element>::VALUES * PANEL * sizeof(Element);
        const bool is_full = count > HALF;
        // The compiler does not know that the loads below read memory.
        asm volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const auto load_rows = [&](const Element* from) {
            _tile_loadd(4, from, row_bytes);
            if (is_full) _tile_loadd(5, from + HALF * stride, row_bytes);
        };
        // One half of the panel is loaded while the other is multiplied.
        const auto multiply_left = [&] {
            _tile_dpbf16ps(0, 4, 6);
            if (is_full) _tile_dpbf16ps(2, 5, 6);
        };
        const auto multiply_right = [&] {
            _tile_dpbf16ps(1, 4, 7);
            if (is_full) _tile_dpbf16ps(3, 5, 7);
        };
        const auto multiply_by = [&](const Element* from) {
            _tile_loadd(6, from, line);
            multiply_left();
            _tile_loadd(7, from + PANEL, line);
            multiply_right();
        };
        for (int64_t k = 0; k < inputs; k += PARTS * DEPTH, rows += PARTS * DEPTH, panel += PARTS * BLOCK) {
            if constexpr (FETCH)
                for (int64_t i = 0; i < PARTS * BLOCK; i += LINE / sizeof(Element))
                    __builtin_prefetch(panel + PREFETCH_BYTES / sizeof(Element) + i, 0, 2);
            load_rows(rows);
            if constexpr (PARTS == 2) multiply_by(panel + BLOCK);
            multiply_by(panel);
            if constexpr (PARTS == 2) {
                load_rows(rows + DEPTH);
                multiply_left();
                multiply_right();
            }
        }
        const int64_t sums_bytes = sums_stride * sizeof(float);
        _tile_stored(0, sums, sums_bytes);
        _tile_stored(1, sums + LANES, sums_bytes);
        if (is_full) {
            _tile_stored(2, sums + HALF * sums_stride, sums_bytes);
            _tile_stored(3, sums + HALF * sums_stride + LANES, sums_bytes);
        }
        asm volatile("" ::: "memory");
    }
};

#else

inline bool may_use_amx() { return false; }

#endif

}  // namespace quire
