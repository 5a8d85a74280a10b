// Arithmetic in sixteen lanes.
//
// Fused operations are written out, and -ffp-contract=off keeps the compiler from adding others: a function could have
// other bits in each place where it is inlined.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "lanes.h"

namespace quire {

// The upper half of a float's bits.
struct BFloat16 {
    uint16_t bits;
};

#ifdef QUIRE_PAIRS
inline EightFloats multiply_add(EightFloats a, EightFloats b, EightFloats c) {
    return (EightFloats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#endif

// a * b + c, rounded once where the processor has such an instruction.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(QUIRE_PAIRS)
    return {multiply_add(a.low, b.low, c.low), multiply_add(a.high, b.high, c.high)};
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

inline float largest(Floats v) {
    return reduce(v, [](auto a, auto b) { return select(a > b, a, b); });
}
inline bool any_above(Floats v, float bound) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#else
    return any(v > bound);
#endif
}
inline float total(Floats v) {
    return reduce(v, [](auto a, auto b) { return a + b; });
}
inline uint32_t total(Words v) {
#ifdef __AVX512F__
    return static_cast<uint32_t>(_mm512_reduce_add_epi32((__m512i)v));
#else
    uint32_t sum = 0;
    for (int i = 0; i < LANES; ++i) sum += v[i];
    return sum;
#endif
}

// 2**v, to some 2 units in the last place; 0 or nearly so below -126.5, infinite from 128 on at the latest.
inline Floats exp2(Floats v) {
#ifdef __AVX512DQ__
    const Floats x = (Floats)_mm512_reduce_ps((__m512)v, 0);
    const Floats whole = v - x;
#else
    v = select(v < -127.0f, splat(-127.0f), v);
    v = select(v > 128.0f, splat(128.0f), v);
    const Floats shift = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
    const Floats whole = (v + shift) - shift;
    const Floats x = v - whole;
#endif
    // The polynomial of its degree that is nearest to 2**x on [-1/2, 1/2] and 1 at 0: with an error below 2**-22
    Floats y = splat(1.326472724715283e-3f);
    for (const float term :
         {9.671512688161656e-3f, 5.550733743574254e-2f, 2.4022242084634934e-1f, 6.93146977598717e-1f, 1.0f})
        y = multiply_add(y, x, splat(term));
#ifdef __AVX512DQ__
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
    const Ints exponent = (to_ints(whole) + 127) << 23;
    return y * (Floats)exponent;
#endif
}

constexpr float LOG2_E = 1.4426950408889634f;

// Rounded to the nearest, ties to even.
inline Halves round_to_bfloat16(Floats v) {
#ifdef __AVX512BF16__
    return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
    const Words bits = (Words)v;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    return to_halves(select(v == v, rounded, quiet));
#endif
}

inline Floats load_floats(const float* p) { return load<Floats>(p); }
inline Floats floats_of(Halves v) { return (Floats)(to_words(v) << 16); }
inline Floats load_floats(const BFloat16* p) { return floats_of(load<Halves>(p)); }
inline float as_float(float x) { return x; }
inline float as_float(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}
inline void convert(float x, float* to) { *to = x; }
inline void convert(float x, BFloat16* to) { to->bits = round_to_bfloat16(splat(x))[0]; }
inline void store_floats(float* p, Floats v) { store(p, v); }
inline void store_floats(BFloat16* p, Floats v) { store(p, round_to_bfloat16(v)); }
// Numbers that the type has exactly.
inline void store_exact(float* p, Floats v) { store(p, v); }
inline void store_exact(BFloat16* p, Floats v) {
#ifdef __AVX512BF16__
    store_floats(p, v);
#else
    store(p, to_halves((Words)v >> 16));
#endif
}

// Numbers of 64 codes.
inline void store_line(float* to, const int8_t* codes) {
    for (int i = 0; i < 4 * LANES; i += LANES) store(to + i, to_floats(load<Bytes>(codes + i)));
}
#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
// The lower or upper byte of the integers 0 to 127 in bfloat16.
struct alignas(64) ExactBytes {
    uint8_t bytes[128];
    constexpr explicit ExactBytes(bool is_upper) : bytes() {
        for (int i = 1; i < 128; ++i) {
            int exponent = 0;
            while (i >> (exponent + 1)) ++exponent;
            const int bits = (127 + exponent) << 7 | ((i << (7 - exponent)) & 0x7f);
            bytes[i] = static_cast<uint8_t>(is_upper ? bits >> 8 : bits);
        }
    }
};
inline constexpr ExactBytes LOWER_BYTES{false}, UPPER_BYTES{true};

// A byte of a number depends on the code alone: two look-ups take fewer instructions than two conversions.
inline void store_line(BFloat16* to, const int8_t* codes) {
    // Bytes are interleaved in each 128 bits, so the first half of the codes goes to the lower halves of these.
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512i ordered = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes)), sizes = _mm512_abs_epi8(ordered);
    const auto look_up = [&](const ExactBytes& table) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(table.bytes), sizes, _mm512_load_si512(table.bytes + 64));
    };
    const __m512i lower = look_up(LOWER_BYTES);
    const __m512i upper = _mm512_or_si512(look_up(UPPER_BYTES), _mm512_and_si512(ordered, _mm512_set1_epi8(-128)));
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(lower, upper));
    _mm512_storeu_si512(to + 2 * LANES, _mm512_unpackhi_epi8(lower, upper));
}
#else
inline void store_line(BFloat16* to, const int8_t* codes) {
    for (int i = 0; i < 4 * LANES; i += LANES) store_exact(to + i, to_floats(load<Bytes>(codes + i)));
}
#endif

// Pairs of neighbouring numbers: the first of each pair from `low`, the second from `high`.
inline Words pairs_of(Floats low, Floats high) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    const Words first = (Words)LANE, pairs = first | (first + LANES) << 16;
    return (Words)_mm512_permutexvar_epi16((__m512i)pairs, halves);
#else
    const auto words = [](Floats v) { return to_words(round_to_bfloat16(v)); };
    return words(low) | words(high) << 16;
#endif
}

// Numbers in float16, none of them infinite or NaN.
inline Floats load_float16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)load<Halves>(p));
#else
    const Words bits = to_words(load<Halves>(p));
    // 2**112 for the difference of the exponents' biases, which makes subnormal numbers normal ones too.
    const Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Floats)((Words)size | (bits & 0x8000) << 16);
#endif
}

// A function put(row, i, values) that writes to rows at a stride.
template <class T>
auto put_in(T* rows, int64_t stride) {
    return [=](int64_t row, int64_t i, Floats values) { store_floats(rows + row * stride + i, values); };
}

inline Floats floats_of(const int8_t* p) { return to_floats(load<Bytes>(p)); }

inline Floats multiply_add(Words a, Words b, Floats c) { return multiply_add((Floats)a, (Floats)b, c); }

#ifdef QUIRE_PAIRS
inline EightInts multiply_bytes(EightWords a, EightWords b, EightInts sums) {
    const __m256i x = (__m256i)a, y = (__m256i)b;
#ifdef __AVXVNNI__
    return (EightInts)_mm256_dpbusd_avx_epi32((__m256i)sums, x, y);
#else
    // In lanes of 16 bits, as maddubs has them, a sum of two products might not fit.
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0xff)), _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
    return sums + (EightInts)_mm256_add_epi32(even, odd);
#endif
}
#endif

// Adds the products of four neighbouring bytes to each lane: unsigned ones of a, signed ones of b.
inline Ints multiply_bytes(Words a, Words b, Ints sums) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    const __m512i x = (__m512i)a, y = (__m512i)b;
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0xff)), _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(x, 8), _mm512_srai_epi16(y, 8));
    return sums + (Ints)_mm512_add_epi32(even, odd);
#elif defined(QUIRE_PAIRS)
    return {multiply_bytes(a.low, b.low, sums.low), multiply_bytes(a.high, b.high, sums.high)};
#else
    for (int bit = 0; bit < 32; bit += 8) sums += (Ints)((a >> bit) & 0xff) * ((Ints)(b << (24 - bit)) >> 24);
    return sums;
#endif
}

// As multiply_bytes, of bytes of a up to 15: a sum of two products fits 16 bits.
inline Ints multiply_nibbles(Words a, Words b, Ints sums) {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)a, (__m512i)b);
    return sums + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(QUIRE_PAIRS) && !defined(__AVXVNNI__)
    const auto products = [](EightWords x, EightWords y) {
        return (EightInts)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)x, (__m256i)y), _mm256_set1_epi16(1));
    };
    return sums + Ints{products(a.low, b.low), products(a.high, b.high)};
#else
    return multiply_bytes(a, b, sums);
#endif
}

// totals += (sums - zero * sum) * scale * factor
inline void add_scaled(float* totals, Ints sums, Floats zero, Floats sum, Floats scale, Floats factor) {
    const Floats steps = multiply_add(-zero, sum, to_floats(sums));
    store(totals, multiply_add(steps * scale, factor, load_floats(totals)));
}
// totals += (sums * scale + minimum * sum) * factor
inline void add_with_minimum(float* totals, Ints sums, Floats scale, Floats minimum, Floats sum, Floats factor) {
    const Floats numbers = multiply_add(to_floats(sums), scale, minimum * sum);
    store(totals, multiply_add(numbers, factor, load_floats(totals)));
}
// totals += sums * scale * factor
inline void add_scaled(float* totals, Ints sums, Floats scale, Floats factor) {
    store(totals, multiply_add(to_floats(sums) * scale, factor, load_floats(totals)));
}
// totals += sums * factor
inline void add_scaled(float* totals, Ints sums, Floats factor) {
    store(totals, multiply_add(to_floats(sums), factor, load_floats(totals)));
}

// Rows become columns: each time, the bits of a word's row and column are rotated by one.
inline void transpose(Words rows[LANES]) {
    for (int time = 0; time < 4; ++time) {
        Words next[LANES];
        for (int i = 0; i < LANES / 2; ++i) {
            const Words a = rows[i], b = rows[i + LANES / 2];
            next[2 * i] = interleave_low(a, b);
            next[2 * i + 1] = interleave_high(a, b);
        }
        std::memcpy(rows, next, sizeof next);
    }
}

// The first `count` of sixteen numbers, the others zeros.
inline Floats load_part(const float* from, int64_t count) {
    if (count >= LANES) return load<Floats>(from);
    Floats part = {};
    if (count > 0) std::memcpy(&part, from, static_cast<size_t>(count) * sizeof(float));
    return part;
}

// Stores the first `count` of sixteen numbers.
template <class T>
inline void store_part(T* to, Floats v, int64_t count) {
    if (count >= LANES) return store_floats(to, v);
    T part[LANES];
    store_floats(part, v);
    if (count > 0) std::memcpy(static_cast<void*>(to), part, static_cast<size_t>(count) * sizeof(T));
}

// A byte of a product in 8 bits, see codes.h.
struct Code {
    uint8_t bits;
};

// As many rows as fit the registers beside two vectors of the other factor, with two (WIDE: groups_beside()) sums in each row. Of
// pairs, the second vector of the other factor is loaded when the first has been used: 3 rows are faster than 2 or 4.
#if defined(__AVX512F__)
constexpr int ROWS = 14;
constexpr int ROWS_WIDE = 6;
constexpr int groups_beside(int) { return 4; }
#elif defined(QUIRE_PAIRS)
constexpr int ROWS = 3;
constexpr int ROWS_WIDE = 6;
constexpr int groups_beside(int rows) { return rows > 3 ? 1 : rows > 1 ? 2 : 4; }
#else
constexpr int ROWS = 2;
constexpr int ROWS_WIDE = 1;
constexpr int groups_beside(int) { return 4; }
#endif

// The most rows of a tile of products of floats or bfloat16. Beyond ROWS, the sums of half a panel are computed before those of the
// other half: a vector of pairs is then loaded, and of bfloat16 taken apart, for twice as many rows.
#ifdef QUIRE_PAIRS
constexpr int MOST_NUMBER_ROWS = 2 * ROWS;
#else
constexpr int MOST_NUMBER_ROWS = ROWS;
#endif

// The factors of products: one float, two neighbouring bfloat16, or four neighbouring bytes, in each lane. Where bfloat16 is taken apart
// for a product, rows that many lanes are multiplied by are kept as floats, their type `Row`: at_place() has the numbers at a place
// of lanes, and load_at_place() loads those of one vector.
template <class T>
struct Lane;

template <>
struct Lane<float> {
    static constexpr int VALUES = 1;
    static constexpr int MOST_ROWS = MOST_NUMBER_ROWS;
    static Words broadcast(const float* p) {
        uint32_t bits;
        std::memcpy(&bits, p, sizeof bits);
        return splat(bits);
    }
    static Floats multiply_add(Words a, Words b, Floats sums) { return quire::multiply_add(a, b, sums); }
#ifdef QUIRE_PAIRS
    static EightFloats multiply_add(EightWords a, EightWords b, EightFloats sums) {
        return quire::multiply_add((EightFloats)a, (EightFloats)b, sums);
    }
#endif
    using Row = float;
    static auto at_place(auto lanes, int) { return lanes; }
    static Vector load_at_place(const float* p, int) { return load<Vector>(p); }
};

#ifdef QUIRE_PAIRS
// The upper halves of lanes in memory. GCC would keep in registers what it has loaded for the lower halves, and the mask, and would
// keep sums in memory.
inline EightWords load_upper_halves(const BFloat16* p) {
    static constexpr EightWords MASK = EightWords{} + 0xffff0000u;
    EightWords upper;
    __asm__("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=x"(upper) : "m"(*reinterpret_cast<const char(*)[sizeof upper]>(p)), "m"(MASK));
    return upper;
}
#endif

template <>
struct Lane<BFloat16> {
    static constexpr int VALUES = 2;
    static constexpr int MOST_ROWS = MOST_NUMBER_ROWS;
    static Words broadcast(const BFloat16* p) {
        uint32_t pair;
        std::memcpy(&pair, p, sizeof pair);
        return splat(pair);
    }
    static Floats multiply_add(Words a, Words b, Floats sums) {
#ifdef __AVX512BF16__
        return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
        sums = quire::multiply_add(a << 16, b << 16, sums);
        return quire::multiply_add(a & 0xffff0000u, b & 0xffff0000u, sums);
#endif
    }
#ifdef QUIRE_PAIRS
    using Row = float;
    static auto at_place(auto lanes, int place) { return place ? lanes & 0xffff0000u : lanes << 16; }
    static Vector load_at_place(const BFloat16* p, int place) { return place ? load_upper_halves(p) : load<Vector>(p) << 16; }
#else
    using Row = BFloat16;
    static auto at_place(auto lanes, int) { return lanes; }
    static Vector load_at_place(const BFloat16* p, int) { return load<Vector>(p); }
#endif
};

template <>
struct Lane<Code> {
    static constexpr int VALUES = 4;
    static constexpr int MOST_ROWS = ROWS;
    static Words broadcast(const Code* p) {
        uint32_t four;
        std::memcpy(&four, p, sizeof four);
        return splat(four);
    }
};

// Calls f.template operator()<N>() for the N in 1..MOST that equals n.
template <int MOST, class F>
inline void with_count(int n, F&& f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return with_count<MOST - 1>(n, f);
    }
    f.template operator()<MOST>();
}

}  // namespace quire
