// Sixteen lanes of 32 bits, in the compiler's own vectors: one register where there is AVX-512, several elsewhere.
//
// Fused operations are written out, and -ffp-contract=off keeps the compiler from adding others: a function could have
// other bits in each place where it is inlined.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace quire {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// The upper half of a float's bits.
struct BFloat16 {
    uint16_t bits;
};

template <class V>
inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
inline void store(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

inline Floats splat(float x) { return Floats{} + x; }
inline Words splat(uint32_t x) { return Words{} + x; }

// a * b + c, rounded once where the processor has such an instruction.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    // In place: taken apart and joined again, they would go through memory.
    const auto* x = reinterpret_cast<const __m256*>(&a);
    const auto* y = reinterpret_cast<const __m256*>(&b);
    auto* sum = reinterpret_cast<__m256*>(&c);
    for (int half = 0; half < 2; ++half) sum[half] = _mm256_fmadd_ps(x[half], y[half], sum[half]);
    return c;
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Combines each lane with the one half a vector away, then a quarter, and so on: every lane ends up with the result.
template <class F>
inline float reduce(Floats v, F&& join) {
    v = join(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = join(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = join(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = join(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}

inline float largest(Floats v) {
    return reduce(v, [](Floats a, Floats b) { return a > b ? a : b; });
}
// Whether a comparison holds in some lane.
inline bool any(Ints comparison) { return largest(__builtin_convertvector(-comparison, Floats)) > 0; }
inline bool any_above(Floats v, float bound) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#else
    return any(v > bound);
#endif
}
inline float total(Floats v) {
    return reduce(v, [](Floats a, Floats b) { return a + b; });
}

// 2**v, to some 2 units in the last place; 0 or nearly so below -126.5, infinite from 128 on at the latest.
inline Floats exp2(Floats v) {
#ifdef __AVX512DQ__
    const Floats x = (Floats)_mm512_reduce_ps((__m512)v, 0);
    const Floats whole = v - x;
#else
    v = v < -127.0f ? splat(-127.0f) : v;
    v = v > 128.0f ? splat(128.0f) : v;
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
    const Ints exponent = (__builtin_convertvector(whole, Ints) + 127) << 23;
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
    return __builtin_convertvector((v == v) ? rounded : quiet, Halves);
#endif
}

inline Floats load_floats(const float* p) { return load<Floats>(p); }
inline Floats floats_of(Halves v) { return (Floats)(__builtin_convertvector(v, Words) << 16); }
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

// Pairs of neighbouring numbers: the first of each pair from `low`, the second from `high`.
inline Words pairs_of(Floats low, Floats high) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    const Words first = (Words)LANE, pairs = first | (first + LANES) << 16;
    return (Words)_mm512_permutexvar_epi16((__m512i)pairs, halves);
#else
    const auto words = [](Floats v) { return __builtin_convertvector(round_to_bfloat16(v), Words); };
    return words(low) | words(high) << 16;
#endif
}

// Numbers in float16, none of them infinite or NaN.
inline Floats load_float16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)load<Halves>(p));
#else
    const Words bits = __builtin_convertvector(load<Halves>(p), Words);
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

inline Floats floats_of(const int8_t* p) {
    typedef int8_t Bytes __attribute__((vector_size(16)));
#ifdef __AVX512F__
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)load<Bytes>(p)));
#else
    return __builtin_convertvector(load<Bytes>(p), Floats);
#endif
}

// What inner loops keep in registers: sums, and factors of products. GCC keeps a vector of two registers in memory, where a
// loop that adds to it takes 20 times as long (linear(), float32, 32 rows, AMD EPYC of 2021); it keeps the members of a
// struct in registers.
#if defined(__FMA__) && defined(__AVX2__) && !defined(__AVX512F__)
#define QUIRE_PAIRS 1
struct Sums {
    __m256 low, high;
};
struct Factors {
    __m256i low, high;
};
// Sums of products in 8 bits.
struct IntSums {
    __m256i low, high;
};
inline Sums load_sums(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + LANES / 2)}; }
inline void store(float* p, Sums sums) {
    _mm256_storeu_ps(p, sums.low);
    _mm256_storeu_ps(p + LANES / 2, sums.high);
}
inline Floats floats_of(Sums sums) {
    float p[LANES];
    store(p, sums);
    return load<Floats>(p);
}
// The two halves may be apart.
inline Factors load_factors(const void* low, const void* high) {
    return {_mm256_loadu_si256(static_cast<const __m256i*>(low)), _mm256_loadu_si256(static_cast<const __m256i*>(high))};
}
inline Factors load_factors(const void* p) { return load_factors(p, static_cast<const __m256i*>(p) + 1); }
inline Factors broadcast_bits(uint32_t bits) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
    return {all, all};
}
inline Factors operator&(Factors a, uint32_t bits) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
    return {_mm256_and_si256(a.low, all), _mm256_and_si256(a.high, all)};
}
inline Factors operator<<(Factors a, int count) {
    return {_mm256_slli_epi32(a.low, count), _mm256_slli_epi32(a.high, count)};
}
inline Factors operator>>(Factors a, int count) {
    return {_mm256_srli_epi32(a.low, count), _mm256_srli_epi32(a.high, count)};
}
inline Sums multiply_add(Factors a, Factors b, Sums sums) {
    return {_mm256_fmadd_ps(_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(b.low), sums.low),
            _mm256_fmadd_ps(_mm256_castsi256_ps(a.high), _mm256_castsi256_ps(b.high), sums.high)};
}
inline IntSums splat_sums(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
// Adds the products of four neighbouring bytes to each lane: unsigned ones of a, signed ones of b.
inline __m256i multiply_bytes(__m256i a, __m256i b, __m256i sums) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sums, a, b);
#else
    // In lanes of 16 bits, as maddubs has them, a sum of two products might not fit.
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
#endif
}
inline IntSums multiply_bytes(Factors a, Factors b, IntSums sums) {
    return {multiply_bytes(a.low, b.low, sums.low), multiply_bytes(a.high, b.high, sums.high)};
}
// As multiply_bytes, of bytes of a up to 15: a sum of two products fits 16 bits.
inline IntSums multiply_nibbles(Factors a, Factors b, IntSums sums) {
#ifdef __AVXVNNI__
    return multiply_bytes(a, b, sums);
#else
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(_mm256_maddubs_epi16(a.low, b.low), ones)),
            _mm256_add_epi32(sums.high, _mm256_madd_epi16(_mm256_maddubs_epi16(a.high, b.high), ones))};
#endif
}
inline Sums load_float16_sums(const uint16_t* p) {
    float numbers[LANES];
    store(numbers, load_float16(p));
    return load_sums(numbers);
}
// totals += (sums - zero * sum) * scale * factor
inline void add_scaled(float* totals, IntSums sums, Sums zero, float sum, Sums scale, float factor) {
    const Sums before = load_sums(totals);
    const __m256 all = _mm256_set1_ps(sum), factors = _mm256_set1_ps(factor);
    const auto half = [&](__m256i products, __m256 zeros, __m256 scales, __m256 total) {
        const __m256 steps = _mm256_fnmadd_ps(zeros, all, _mm256_cvtepi32_ps(products));
        return _mm256_fmadd_ps(_mm256_mul_ps(steps, scales), factors, total);
    };
    store(totals, Sums{half(sums.low, zero.low, scale.low, before.low), half(sums.high, zero.high, scale.high, before.high)});
}
// totals += (sums * scale + minimum * sum) * factor
inline void add_with_minimum(float* totals, IntSums sums, Sums scale, Sums minimum, float sum, float factor) {
    const Sums before = load_sums(totals);
    const __m256 all = _mm256_set1_ps(sum), factors = _mm256_set1_ps(factor);
    const auto half = [&](__m256i products, __m256 scales, __m256 minimums, __m256 total) {
        const __m256 numbers = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scales, _mm256_mul_ps(minimums, all));
        return _mm256_fmadd_ps(numbers, factors, total);
    };
    store(totals, Sums{half(sums.low, scale.low, minimum.low, before.low), half(sums.high, scale.high, minimum.high, before.high)});
}
// totals += sums * scale * factor
inline void add_scaled(float* totals, IntSums sums, Sums scale, float factor) {
    const Sums before = load_sums(totals);
    const __m256 factors = _mm256_set1_ps(factor);
    const auto half = [&](__m256i products, __m256 scales, __m256 total) {
        return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(products), scales), factors, total);
    };
    store(totals, Sums{half(sums.low, scale.low, before.low), half(sums.high, scale.high, before.high)});
}
// totals += sums * factor
inline void add_scaled(float* totals, IntSums sums, float factor) {
    const Sums before = load_sums(totals);
    const __m256 factors = _mm256_set1_ps(factor);
    store(totals, Sums{_mm256_fmadd_ps(_mm256_cvtepi32_ps(sums.low), factors, before.low),
                       _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums.high), factors, before.high)});
}
#else
// As above.
typedef Floats Sums;
typedef Ints IntSums;
typedef Words Factors;
inline Sums load_sums(const float* p) { return load<Floats>(p); }
inline Floats floats_of(Sums sums) { return sums; }
inline Factors load_factors(const void* low, const void* high) {
    Factors both;
    std::memcpy(&both, low, sizeof both / 2);
    std::memcpy(reinterpret_cast<char*>(&both) + sizeof both / 2, high, sizeof both / 2);
    return both;
}
inline Factors load_factors(const void* p) { return load<Factors>(p); }
inline Factors broadcast_bits(uint32_t bits) { return splat(bits); }
inline Sums multiply_add(Factors a, Factors b, Sums sums) { return multiply_add((Floats)a, (Floats)b, sums); }
inline IntSums splat_sums(int32_t x) { return Ints{} + x; }
inline IntSums multiply_bytes(Factors a, Factors b, IntSums sums) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    const __m512i x = (__m512i)a, y = (__m512i)b;
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0xff)), _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(x, 8), _mm512_srai_epi16(y, 8));
    return sums + (Ints)_mm512_add_epi32(even, odd);
#else
    for (int bit = 0; bit < 32; bit += 8) sums += (Ints)((a >> bit) & 0xff) * ((Ints)(b << (24 - bit)) >> 24);
    return sums;
#endif
}
inline IntSums multiply_nibbles(Factors a, Factors b, IntSums sums) {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)a, (__m512i)b);
    return sums + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    return multiply_bytes(a, b, sums);
#endif
}
inline Sums load_float16_sums(const uint16_t* p) { return load_float16(p); }
inline void add_scaled(float* totals, IntSums sums, Sums zero, float sum, Sums scale, float factor) {
    const Floats steps = multiply_add(-zero, splat(sum), __builtin_convertvector(sums, Floats));
    store(totals, multiply_add(steps * scale, splat(factor), load_floats(totals)));
}
inline void add_with_minimum(float* totals, IntSums sums, Sums scale, Sums minimum, float sum, float factor) {
    const Floats numbers = multiply_add(__builtin_convertvector(sums, Floats), scale, minimum * sum);
    store(totals, multiply_add(numbers, splat(factor), load_floats(totals)));
}
inline void add_scaled(float* totals, IntSums sums, Sums scale, float factor) {
    store(totals, multiply_add(__builtin_convertvector(sums, Floats) * scale, splat(factor), load_floats(totals)));
}
inline void add_scaled(float* totals, IntSums sums, float factor) {
    store(totals, multiply_add(__builtin_convertvector(sums, Floats), splat(factor), load_floats(totals)));
}
#endif

// Rows become columns: each time, the bits of a word's row and column are rotated by one.
inline void transpose(Words rows[LANES]) {
    for (int time = 0; time < 4; ++time) {
        Words next[LANES];
        for (int i = 0; i < LANES / 2; ++i) {
            const Words a = rows[i], b = rows[i + LANES / 2];
            next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
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

// The factors of products: one float, two neighbouring bfloat16, or four neighbouring bytes, in each lane.
template <class T>
struct Lane;

template <>
struct Lane<float> {
    static constexpr int VALUES = 1;
    static Factors broadcast(const float* p) {
        uint32_t bits;
        std::memcpy(&bits, p, sizeof bits);
        return broadcast_bits(bits);
    }
    static Sums multiply_add(Factors a, Factors b, Sums sums) { return quire::multiply_add(a, b, sums); }
};

template <>
struct Lane<BFloat16> {
    static constexpr int VALUES = 2;
    static Factors broadcast(const BFloat16* p) {
        uint32_t pair;
        std::memcpy(&pair, p, sizeof pair);
        return broadcast_bits(pair);
    }
    static Sums multiply_add(Factors a, Factors b, Sums sums) {
#ifdef __AVX512BF16__
        return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
        sums = quire::multiply_add(a << 16, b << 16, sums);
        return quire::multiply_add(a & 0xffff0000u, b & 0xffff0000u, sums);
#endif
    }
};

template <>
struct Lane<Code> {
    static constexpr int VALUES = 4;
    static Factors broadcast(const Code* p) {
        uint32_t four;
        std::memcpy(&four, p, sizeof four);
        return broadcast_bits(four);
    }
};

// As many rows as fit the registers beside two vectors of the other factor, with two (WIDE: four) sums in each row. Of
// pairs, the second vector of the other factor is loaded when the first has been used: 3 rows are faster than 2 or 4.
#if defined(__AVX512F__)
constexpr int ROWS = 14;
constexpr int ROWS_WIDE = 6;
#elif defined(QUIRE_PAIRS)
constexpr int ROWS = 3;
constexpr int ROWS_WIDE = 1;
#else
constexpr int ROWS = 2;
constexpr int ROWS_WIDE = 1;
#endif

// Calls f.template operator()<N>() for the N in 1..MOST that equals n.
template <int MOST, class F>
inline void with_count(int n, F&& f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return with_count<MOST - 1>(n, f);
    }
    f.template operator()<MOST>();
}

}  // namespace quire
