// Products by the tile registers of AMX: 32 rows and 32 outputs at a time, of factors in bfloat16.
//
// A float32 factor is the sum of two of bfloat16: high + low, 16 bits of its 24. A product is then three: of high and high,
// high and low, low and high, and its relative error is about 2**-16. As in linear.h, a row's bits do not depend on others.
#pragma once

#include <array>
#include <type_traits>

#include "linear.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
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

// The registers of the thread that holds it, in the shapes of products: all of 16 rows of 64 bytes.
class AmxRegisters {
public:
    static constexpr int64_t ROWS = 16;

    AmxRegisters() { load_products(); }
    AmxRegisters(const AmxRegisters&) = delete;
    ~AmxRegisters() { _tile_release(); }

    static void load_products() { load({16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}); }

    // Other shapes: rows of each register, and bytes of a row.
    static void load(const std::array<uint8_t, 8>& rows, const std::array<uint16_t, 8>& row_bytes) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        std::copy(row_bytes.begin(), row_bytes.end(), shapes.row_bytes);
        std::copy(rows.begin(), rows.end(), shapes.rows);
        asm volatile("" ::"m"(shapes));  // the compiler does not know that all of it is read
        _tile_loadconfig(&shapes);
    }
};

// Prefetches `lines` cache lines at each call, up to `end`. Calls are spread between loads, which share the line fill buffers.
struct PrefetchStream {
    const char* next = nullptr;
    const char* end = nullptr;
    int64_t lines = 0;

    void prefetch() {
        if (next >= end) return;
        for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(next + i * LINE, 0, 1);
        next += lines * LINE;
    }
};

// Factors of PARTS bfloat16 each. Inputs are in blocks of 32: of each block first the high parts, then the low ones; in rows
// as in panels. Rows are a whole number of blocks, zeros beyond the last input, and may be read up to a multiple of 32.
template <int PARTS>
struct AmxFactors {
    using Element = BFloat16;
    using Value = std::conditional_t<PARTS == 1, BFloat16, float>;  // what is rounded to such factors
    using Registers = AmxRegisters;
    static constexpr int64_t ROWS = 32, DEPTH = 32;

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
        const auto panel = [&](int64_t p) { return reinterpret_cast<const Element*>(panels + p * bytes); };
        // While all tiles of a panel are multiplied, the lines of another one are prefetched.
        const int64_t lines = ceil_div(ceil_div(bytes, LINE), num_tiles * ceil_div(matrix.inputs, DEPTH * PARTS) * CALLS);
        alignas(LINE) float sums[ROWS * PANEL];
        // Returns whether the piece is still this thread's.
        const auto write = [&](int64_t row, int64_t p) {
            return task_claim.write([&] { finish_panel(matrix, p, row, std::min(ROWS, piece.last_row - row), sums, finish); });
        };
        if (matrix.is_expanded()) {
            for (int64_t p = piece.first_panel + units / num_tiles; p < piece.last_panel; ++p, units = 0) {
                expand_panel(matrix, panel(p), scratch);
                PrefetchStream ahead{panels + (p + 1) * bytes, panels + (p + 2) * bytes, lines};
                for (int64_t row = piece.first_row + units % num_tiles * ROWS; row < piece.last_row; row += ROWS) {
                    multiply_panel<Kept::PANEL>(rows + row * stride, stride, scratch, matrix.inputs, piece.last_row - row, sums, PANEL, ahead);
                    if (!write(row, p)) return false;
                }
            }
            return true;
        }
        int64_t p = piece.first_panel + units % num_panels;
        // Panels that are used once are read as one stream.
        PrefetchStream ahead{static_cast<const char*>(piece.next), static_cast<const char*>(piece.next_end), lines};
        if (num_tiles == 1) ahead = {panels + p * bytes + PREFETCH_BYTES, panels + piece.last_panel * bytes + PREFETCH_BYTES, lines};
        for (int64_t row = piece.first_row + units / num_panels * ROWS; row < piece.last_row; row += ROWS, p = piece.first_panel)
            for (; p < piece.last_panel; ++p) {
                multiply_panel<Kept::ROWS>(rows + row * stride, stride, panel(p), matrix.inputs, piece.last_row - row, sums, PANEL, ahead);
                if (!write(row, p)) return false;
            }
        return true;
    }

    // As multiply() of linear.h.
    template <class F>
    static void multiply(ThreadPool& pool, const Matrix& matrix, const Element* rows, int64_t num_rows, int64_t stride,
                         Element* scratch, F&& finish) {
        const int64_t expanded = expanded_size(matrix.inputs) * static_cast<int64_t>(sizeof(Element));
        const TaskGrid grid(num_rows, ROWS, ceil_div(matrix.outputs, PANEL), expanded, pool.size(), LEAST_PANELS);
        for_pieces(pool, matrix, grid, num_rows, panel_bytes<Element>(matrix), [&](const Piece& piece, TaskClaim& task_claim) {
            multiply_piece(matrix, piece, task_claim.next(), rows, stride, scratch, task_claim, finish);
        });
    }

    // The factor that stays in the first-level cache. The other one, which passes through, is loaded with a hint to evict little.
    enum class Kept { ROWS, PANEL };

    // Sums [32, PANEL] of `count` rows and one panel, at a stride; those of rows beyond are undefined.
    template <Kept KEPT>
    static void multiply_panel(const Element* rows, int64_t stride, const Element* panel, int64_t inputs, int64_t count,
                               float* sums, int64_t sums_stride, PrefetchStream& ahead) {
        constexpr int64_t BLOCK = DEPTH * PANEL, HALF = ROWS / 2;
        const int64_t row_bytes = stride * sizeof(Element), line = Lane<Element>::VALUES * PANEL * sizeof(Element);
        const int64_t sums_bytes = sums_stride * sizeof(float);
        float* lower = sums + HALF * sums_stride;
        const bool is_full = count > HALF;
        // The compiler does not know that the loads below read memory.
        asm volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const auto load_upper = [&](const Element* from) {
            if constexpr (KEPT == Kept::ROWS) _tile_loadd(4, from, row_bytes);
            else _tile_stream_loadd(4, from, row_bytes);
        };
        const auto load_lower = [&](const Element* from) {
            from += HALF * stride;
            if constexpr (KEPT == Kept::ROWS) _tile_loadd(5, from, row_bytes);
            else _tile_stream_loadd(5, from, row_bytes);
        };
        const auto load_left = [&](const Element* from) {
            if constexpr (KEPT == Kept::PANEL) _tile_loadd(6, from, line);
            else _tile_stream_loadd(6, from, line);
        };
        const auto load_right = [&](const Element* from) {
            from += PANEL;
            if constexpr (KEPT == Kept::PANEL) _tile_loadd(7, from, line);
            else _tile_stream_loadd(7, from, line);
        };
        const auto multiply_right = [&] {
            _tile_dpbf16ps(1, 4, 7);
            if (is_full) _tile_dpbf16ps(3, 5, 7);
        };
        // Each tile is loaded just before it is used: loads take about as long as products.
        const auto multiply_by = [&](const Element* half_panels, const Element* new_rows) {
            load_left(half_panels);
            ahead.prefetch();
            if (new_rows) load_upper(new_rows);
            _tile_dpbf16ps(0, 4, 6);
            ahead.prefetch();
            if (is_full) {
                if (new_rows) load_lower(new_rows);
                _tile_dpbf16ps(2, 5, 6);
            }
            ahead.prefetch();
            load_right(half_panels);
            multiply_right();
            ahead.prefetch();
        };
        for (int64_t k = 0; k < inputs; k += PARTS * DEPTH, rows += PARTS * DEPTH, panel += PARTS * BLOCK) {
            if constexpr (PARTS == 1) {
                multiply_by(panel, rows);
            } else {
                multiply_by(panel + BLOCK, rows);
                multiply_by(panel, nullptr);
                load_upper(rows + DEPTH);
                _tile_dpbf16ps(0, 4, 6);
                if (is_full) {
                    load_lower(rows + DEPTH);
                    _tile_dpbf16ps(2, 5, 6);
                }
                multiply_right();
            }
        }
        _tile_stored(0, sums, sums_bytes);
        _tile_stored(1, sums + LANES, sums_bytes);
        if (is_full) {
            _tile_stored(2, lower, sums_bytes);
            _tile_stored(3, lower + LANES, sums_bytes);
        }
        asm volatile("" ::: "memory");
    }

private:
    // Of a piece, also where they are more than fit its share of the second-level cache: rows are loaded once for all of them.
    static constexpr int64_t LEAST_PANELS = 4;
    static constexpr int64_t CALLS = 4 * PARTS;  // of prefetch() in a step
};

#else

inline bool may_use_amx() { return false; }

#endif

}  // namespace quire
