// Products by the tile registers of AMX: 32 rows and 32 outputs at a time, of factors in bfloat16.
//
// A float32 factor is the sum of two of bfloat16: high + low, 16 bits of its 24. A product is then three: of high and high,
// high and low, low and high, and its relative error is about 2**-16. As in linear.h, a row's bits do not depend on others.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

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

// Prefetches `lines` cache lines at each call, up to `end`, and then those of a second range. Calls are spread between loads,
// which share the line fill buffers.
struct PrefetchStream {
    const char* next = nullptr;
    const char* end = nullptr;
    int64_t lines = 0;
    const char* second = nullptr;
    const char* second_end = nullptr;

    void prefetch() {
        if (next >= end) {
            if (second >= second_end) return;
            next = second;
            end = second_end;
            second = second_end;
        }
        for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(next + i * LINE, 0, 2);
        next += lines * LINE;
    }
};

// What is read from panel `p` of a piece on, `distance` bytes ahead: to the end of the piece, then of what follows it.
inline PrefetchStream stream_of(const Piece& piece, const char* panels, int64_t panel_bytes, int64_t p, int64_t distance, int64_t lines) {
    PrefetchStream stream{panels + p * panel_bytes + distance, panels + piece.last_panel * panel_bytes, lines};
    if (piece.next) {
        stream.second = static_cast<const char*>(piece.next);
        stream.second_end = std::min(stream.second + distance, static_cast<const char*>(piece.next_end));
    }
    return stream;
}

// Factors of PARTS bfloat16 each. Inputs are in blocks of 32: of each block first the high parts, then the low ones; in rows
// as in panels. Rows are a whole number of blocks, zeros beyond the last input, and may be read up to a multiple of 32.
template <int PARTS>
struct AmxFactors {
    using Element = BFloat16;
    using Value = std::conditional_t<PARTS == 1, BFloat16, float>;  // what is rounded to such factors
    using Registers = AmxRegisters;
    static constexpr int64_t ROWS = 32, DEPTH = 32;
    static constexpr bool TAKES_TILES = PARTS == 1;  // whether rows may be in tiles
    static constexpr bool MULTIPLIES_SINGLE_PANELS = false;

    static int64_t width(int64_t columns) { return round_up(columns, DEPTH) * PARTS; }
    // Of rows with so many columns: an odd number of lines, since rows at even distances share few sets of a first-level cache.
    static int64_t stride(int64_t columns) {
        const int64_t elements = width(columns);
        return elements == 0 || elements / LINE_ELEMENTS % 2 ? elements : elements + LINE_ELEMENTS;
    }
    static int64_t scratch_size(int64_t inputs) { return expanded_size(round_up(inputs, DEPTH)); }

    static void put(Element* row, int64_t column, Floats v) {
        Element* to = row + column / DEPTH * DEPTH * PARTS + column % DEPTH;
        const Halves high = round_to_bfloat16(v);
        store(to, high);
        if constexpr (PARTS == 2) store_floats(to + DEPTH, v - floats_of(high));
    }

    static int64_t tile_rows(const Matrix&, int64_t) { return ROWS; }

    static int64_t num_units(const Matrix&, const Piece& piece) { return piece.num_units() * TILE_UNITS; }

    // As multiply_piece() of linear.h. A unit is two rows of a tile and a panel.
    template <class F>
    static bool multiply_piece(const Matrix& matrix, const Piece& piece, int64_t units, const FactorRows<const Element>& rows,
                               Element* scratch, TaskClaim& task_claim, F&& finish) {
        // Each panel is used once.
        if (piece.num_tiles() == 1 && !matrix.is_expanded())
            return multiply_tiles<Kept::ROWS>(matrix, piece, units, rows, scratch, task_claim, finish);
        return multiply_tiles<Kept::PANEL>(matrix, piece, units, rows, scratch, task_claim, finish);
    }

    // As multiply() of linear.h.
    template <class F>
    static void multiply(ThreadPool& pool, const Matrix& matrix, const FactorRows<const Element>& rows, int64_t num_rows,
                         Element* scratch, F&& finish) {
        const int64_t expanded = expanded_size(matrix.inputs) * static_cast<int64_t>(sizeof(Element));
        const TaskGrid grid(num_rows, ROWS, ceil_div(matrix.outputs, PANEL), expanded, pool.size(), LEAST_PANELS);
        for_pieces(pool, matrix, grid, num_rows, panel_bytes<Element>(matrix), [&](const Piece& piece, TaskClaim& task_claim) {
            multiply_piece(matrix, piece, task_claim.next(), rows, scratch, task_claim, finish);
        });
    }

    struct Nothing {
        void operator()() const {}
    };

    // The factor that stays in the first-level cache. The other one, which passes through, is loaded with a hint to evict little.
    enum class Kept { ROWS, PANEL };

    // Sums [32, PANEL] of the first `count` rows and one panel, at a stride, or with `adds` what is added to them; those of rows beyond are
    // undefined. Calls between() after the products of each 32 inputs: while the tile registers multiply, it takes little time.
    template <Kept KEPT, class Between = Nothing>
    static void multiply_panel(const FactorRows<const Element>& factors, const Element* panel, int64_t inputs, int64_t count, float* sums,
                               int64_t sums_stride, PrefetchStream& ahead, bool adds = false, Between between = {}) {
        constexpr int64_t BLOCK = DEPTH * PANEL, HALF = ROWS / 2;
        using Rows = FactorRows<const Element>;
        static_assert(HALF == Rows::TILE_ROWS && DEPTH == Rows::TILE_COLUMNS);
        const Element* rows = factors.data;
        const int64_t step = factors.tile_step();
        const int64_t row_bytes = factors.row_step() * sizeof(Element), line = Lane<Element>::VALUES * PANEL * sizeof(Element);
        const int64_t sums_bytes = sums_stride * sizeof(float);
        float* lower = sums + HALF * sums_stride;
        const bool is_full = count > HALF;
        // The compiler does not know that the loads below read memory.
        asm volatile("" ::: "memory");
        if (adds) {
            _tile_loadd(0, sums, sums_bytes);
            _tile_loadd(1, sums + LANES, sums_bytes);
            if (is_full) {
                _tile_loadd(2, lower, sums_bytes);
                _tile_loadd(3, lower + LANES, sums_bytes);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        const auto load_upper = [&](const Element* from) {
            if constexpr (KEPT == Kept::ROWS) _tile_loadd(4, from, row_bytes);
            else _tile_stream_loadd(4, from, row_bytes);
        };
        const auto load_lower = [&](const Element* from) {
            from += HALF * factors.stride;
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
        const auto multiply_upper = [&] {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        };
        const auto multiply_lower = [&] {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        };
        const auto multiply_by = [&](const Element* half_panels, const Element* new_rows) {
            if (new_rows) load_upper(new_rows);
            load_left(half_panels);
            ahead.prefetch();
            load_right(half_panels);
            ahead.prefetch();
            multiply_upper();
            ahead.prefetch();
            if (is_full) {
                if (new_rows) load_lower(new_rows);
                multiply_lower();
            }
            ahead.prefetch();
        };
        for (int64_t k = 0; k < inputs; k += PARTS * DEPTH, rows += PARTS * step, panel += PARTS * BLOCK) {
            if constexpr (PARTS == 1) {
                multiply_by(panel, rows);
            } else {
                multiply_by(panel + BLOCK, rows);
                multiply_by(panel, nullptr);
                load_upper(rows + DEPTH);
                multiply_upper();
                if (is_full) {
                    load_lower(rows + DEPTH);
                    multiply_lower();
                }
            }
            between();
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
    static constexpr int64_t LINE_ELEMENTS = LINE / sizeof(Element);
    // Panels of a piece, also where they are more than fit its share of the second-level cache: with fewer, many rows take longer.
    static constexpr int64_t LEAST_PANELS = 4;
    static constexpr int64_t CALLS = 4 * PARTS;  // of prefetch() in a step
    // Elements of each row that are multiplied by a panel before the next tile of rows: 40 KiB of the panel.
    static constexpr int64_t MOST_KEPT = 640;
    // Elements of a row, and of all rows of a piece, up to which whole panels are multiplied: both then stay in the second-level cache, and
    // adding up parts would take longer.
    static constexpr int64_t MOST_WHOLE = 2048, MOST_WHOLE_ROWS = 320 * 1024;
    // Tiles of a group. Of many inputs fewer, since other threads wait for the units of a thread that is descheduled.
    static constexpr int64_t MOST_TILES = 8, MOST_GROUP_INPUTS = 32 * 1024;
    static constexpr int64_t UNIT_ROWS = 2, TILE_UNITS = ROWS / UNIT_ROWS;

    static int64_t group_tiles(const Matrix& matrix) {
        return std::clamp<int64_t>(MOST_GROUP_INPUTS / std::max<int64_t>(1, matrix.inputs), 1, MOST_TILES);
    }

    // Parts of a panel. Each stays in a cache while all tiles of a group pass through: the first-level one, where there are several.
    static int64_t num_parts(const Matrix& matrix, const Piece& piece) {
        // With two factors for each number there is more to multiply for each one that is loaded: parts are faster.
        if (PARTS == 1 && matrix.inputs <= MOST_WHOLE && (piece.last_row - piece.first_row) * matrix.inputs <= MOST_WHOLE_ROWS) return 1;
        return ceil_div(matrix.inputs, MOST_KEPT);
    }

    // Lines of a panel for each call of prefetch(), while so many tiles are multiplied by another one.
    static int64_t lines_of_call(const Matrix& matrix, int64_t tiles) {
        return ceil_div(panel_bytes<Element>(matrix), LINE * tiles * ceil_div(matrix.inputs, PARTS * DEPTH) * CALLS);
    }

    // Rows of a panel whose sums are computed and whose results are not, and how many units they still are. The last units may have
    // no rows.
    template <class F>
    struct Unfinished {
        const Matrix& matrix;
        TaskClaim& task_claim;
        F& finish;
        int64_t panel = 0, row = 0, last_row = 0, units = 0;
        const float* sums = nullptr;
        bool is_owned = true;  // whether the piece is still this thread's

        // Of so many units.
        [[gnu::always_inline]] void write(int64_t count) {
            if (units == 0) return;
            is_owned = is_owned && task_claim.write([&] {
                finish_panel(matrix, panel, row, std::min(count * UNIT_ROWS, last_row - row), sums, finish);
            }, count);
            units -= count;
            row += count * UNIT_ROWS;
            sums += count * UNIT_ROWS * PANEL;
        }
        void write_all() { write(units); }
    };

    // Results are computed and written between the products of the next tiles, if units are claimed for free.
    template <Kept KEPT, class F>
    static bool multiply_tiles(const Matrix& matrix, const Piece& piece, int64_t units, const FactorRows<const Element>& rows,
                               Element* scratch, TaskClaim& task_claim, F&& finish) {
        const int64_t parts = KEPT == Kept::ROWS ? 1 : num_parts(matrix, piece);
        const int64_t depth = round_up(ceil_div(matrix.inputs, parts), PARTS * DEPTH);
        const int64_t bytes = panel_bytes<Element>(matrix), tiles = piece.num_tiles(), most_tiles = group_tiles(matrix);
        // Tiles whose products are computed before any result is written. One leaves more of the first-level cache for others, where no
        // part is added to its sums.
        const int64_t together = parts == 1 ? 1 : most_tiles;
        const char* panels = static_cast<const char*>(matrix.panels);
        // While one part is multiplied by the first tiles, the next one is prefetched; of a panel that is expanded, the next panel.
        const int64_t distance = KEPT == Kept::ROWS ? PREFETCH_BYTES : depth * PANEL * static_cast<int64_t>(sizeof(Element));
        const int64_t prefetching = std::min(most_tiles, tiles), lines = lines_of_call(matrix, prefetching);
        int64_t p = piece.first_panel + units / (tiles * TILE_UNITS), tile = units / TILE_UNITS % tiles, skipped = units % TILE_UNITS;
        PrefetchStream ahead = stream_of(piece, panels, bytes, p, distance, lines), nothing;
        alignas(LINE) float buffers[2][MOST_TILES * ROWS * PANEL];
        float *sums = buffers[0], *others = buffers[1];
        Unfinished<std::remove_reference_t<F>> unfinished{matrix, task_claim, finish};
        task_claim.set_burst(std::min(together, tiles) * TILE_UNITS);
        for (; p < piece.last_panel; ++p, tile = 0) {
            const auto* panel = reinterpret_cast<const Element*>(panels + p * bytes);
            if (matrix.is_expanded()) {
                expand_panel(matrix, panel, scratch);
                panel = scratch;
                const char* next = p + 1 < piece.last_panel ? panels + (p + 1) * bytes : static_cast<const char*>(piece.next);
                ahead = {next, next ? next + bytes : nullptr, lines};
            }
            for (; tile < tiles; tile += together) {
                const int64_t first = piece.first_row + tile * ROWS, last = std::min(piece.last_row, first + together * ROWS);
                for (int64_t k = 0; k < matrix.inputs; k += depth)
                    for (int64_t row = first; row < last; row += ROWS)
                        multiply_panel<KEPT>(rows.from(row, k), panel + k * PANEL, std::min(depth, matrix.inputs - k),
                                             last - row, &sums[(row - first) * PANEL], PANEL, tile < prefetching ? ahead : nothing, k > 0,
                                             [&] {
                                                 if (AsymmetricFence::LIGHT_IS_FREE) unfinished.write(1);
                                             });
                unfinished.write_all();
                if (!unfinished.is_owned) return false;
                unfinished.panel = p;
                unfinished.row = first + skipped * UNIT_ROWS;
                unfinished.last_row = last;
                unfinished.units = ceil_div(last - first, ROWS) * TILE_UNITS - skipped;
                unfinished.sums = sums + skipped * UNIT_ROWS * PANEL;
                skipped = 0;
                if (AsymmetricFence::LIGHT_IS_FREE) std::swap(sums, others);
                else unfinished.write_all();
            }
        }
        unfinished.write_all();
        return unfinished.is_owned;
    }
};

#else

inline bool may_use_amx() { return false; }

#endif

}  // namespace quire
