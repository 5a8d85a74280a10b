// AMX without its registers, on a processor with AVX-512: to be included before the sources, whose tile instructions then are functions.
// They are slow. Shapes that do not fit each other end the process, and a sanitizer checks what memory is read and written.
#pragma once

#include <immintrin.h>
#include <linux/types.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

namespace amx_emulation {

struct Tile {
    int rows = 0, row_bytes = 0;
    alignas(64) uint8_t data[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool is_configured = false;

[[gnu::noinline]] inline void require(bool condition, const char* rule) {
    if (condition) return;
    std::fprintf(stderr, "AMX emulation: %s\n", rule);
    std::abort();
}

[[gnu::noinline]] inline Tile& tile(int number) {
    require(is_configured, "no configuration is loaded");
    require(tiles[number].rows > 0, "the tile has no shape");
    return tiles[number];
}

[[gnu::noinline]] inline void zero(int number) { std::memset(tile(number).data, 0, sizeof tiles[number].data); }

[[gnu::noinline]] inline void load_config(const void* config) {
    const auto* bytes = static_cast<const uint8_t*>(config);
    require(bytes[0] == 1 && bytes[1] == 0, "the palette must be 1, the start row 0");
    is_configured = true;
    for (int i = 0; i < 8; ++i) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
        tiles[i].rows = bytes[48 + i];
        tiles[i].row_bytes = row_bytes;
        require(tiles[i].rows <= 16 && row_bytes <= 64 && (tiles[i].rows > 0) == (row_bytes > 0), "a tile has at most 16 rows of 64 bytes");
        std::memset(tiles[i].data, 0, sizeof tiles[i].data);
    }
}

[[gnu::noinline]] inline void release() { is_configured = false; }

[[gnu::noinline]] inline void load(int number, const void* base, int64_t stride) {
    zero(number);
    Tile& to = tile(number);
    for (int row = 0; row < to.rows; ++row) std::memcpy(to.data[row], static_cast<const char*>(base) + row * stride, to.row_bytes);
}

[[gnu::noinline]] inline void store(int number, void* base, int64_t stride) {
    const Tile& from = tile(number);
    for (int row = 0; row < from.rows; ++row) std::memcpy(static_cast<char*>(base) + row * stride, from.data[row], from.row_bytes);
}

[[gnu::noinline]] inline void require_shapes(const Tile& sums, const Tile& a, const Tile& b) {
    require(&sums != &a && &sums != &b && &a != &b, "the tiles must differ");
    require(a.rows == sums.rows && b.row_bytes == sums.row_bytes, "the sums must have the rows of the first and the columns of the second factor");
    require(a.row_bytes % 4 == 0 && b.row_bytes % 4 == 0 && b.rows == a.row_bytes / 4, "the factors must have the same depth");
}

inline __m512 row_of(const Tile& tile, int row) { return _mm512_load_ps(tile.data[row]); }
template <class T>
T element(const Tile& tile, int row, int place) {
    T x;
    std::memcpy(&x, tile.data[row] + place * sizeof(T), sizeof x);
    return x;
}
inline void put_row(Tile& tile, int row, __m512 values) { std::memcpy(tile.data[row], &values, tile.row_bytes); }

// Numbers below the least normal one are zeros, in factors and in sums.
inline __m512 flushed(__m512 x) {
    constexpr int DENORMAL = 0x20;
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(~_mm512_fpclass_ps_mask(x, DENORMAL)), x);
}
// The first or second bfloat16 of each pair.
inline __m512 numbers_of(__m512i pairs, int side) {
    return flushed(_mm512_castsi512_ps(side ? _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)) : _mm512_slli_epi32(pairs, 16)));
}

// Sums of the first and of the second numbers of pairs, added up at the end, as the manual says.
[[gnu::noinline]] inline void multiply_bfloat16(int sums_, int a_, int b_) {
    Tile &sums = tile(sums_), &a = tile(a_), &b = tile(b_);
    require_shapes(sums, a, b);
    for (int row = 0; row < sums.rows; ++row) {
        __m512 parts[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int k = 0; k < b.rows; ++k) {
            const __m512i x = _mm512_set1_epi32(element<int>(a, row, k)), y = _mm512_castps_si512(row_of(b, k));
            for (int side = 0; side < 2; ++side)
                parts[side] = flushed(_mm512_fmadd_ps(numbers_of(x, side), numbers_of(y, side), parts[side]));
        }
        const __m512 added = flushed(_mm512_add_ps(parts[0], parts[1]));
        put_row(sums, row, flushed(_mm512_add_ps(flushed(row_of(sums, row)), added)));
    }
}

// Of signed bytes by unsigned ones.
[[gnu::noinline]] inline void multiply_bytes(int sums_, int a_, int b_) {
    Tile &sums = tile(sums_), &a = tile(a_), &b = tile(b_);
    require_shapes(sums, a, b);
    for (int row = 0; row < sums.rows; ++row) {
        __m512i sum = _mm512_castps_si512(row_of(sums, row));
        for (int k = 0; k < b.rows; ++k)
            sum = _mm512_dpbusd_epi32(sum, _mm512_castps_si512(row_of(b, k)), _mm512_set1_epi32(element<int>(a, row, k)));
        put_row(sums, row, _mm512_castsi512_ps(sum));
    }
}

// Permission is given to all.
template <class... Arguments>
long call_system(long number, Arguments... arguments) {
    return number == SYS_arch_prctl ? 0 : ::syscall(number, arguments...);
}

}  // namespace amx_emulation

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig amx_emulation::load_config
#define _tile_release amx_emulation::release
#define _tile_zero amx_emulation::zero
#define _tile_loadd amx_emulation::load
#define _tile_stream_loadd amx_emulation::load
#define _tile_stored amx_emulation::store
#define _tile_dpbf16ps amx_emulation::multiply_bfloat16
#define _tile_dpbsud amx_emulation::multiply_bytes
#define syscall amx_emulation::call_system
