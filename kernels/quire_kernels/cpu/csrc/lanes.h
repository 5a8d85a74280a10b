// Sixteen lanes of 32 bits: one vector where the processor has AVX-512, two where it has AVX2.
//
// Elsewhere they are one vector of the compiler's. GCC keeps a vector of several registers in memory, and computes conversions
// and comparisons of it lane by lane; it keeps the members of a struct in registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace quire {

constexpr int LANES = 16;

typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

#if defined(__FMA__) && defined(__AVX2__) && !defined(__AVX512F__)
#define QUIRE_PAIRS 1

// Two vectors of eight lanes, for which operators do what they do for a vector.
template <class V>
struct Pair {
    using Element = std::remove_cvref_t<decltype(V{}[0])>;

    V low, high;

    Element operator[](int lane) const { return lane < LANES / 2 ? low[lane] : high[lane - LANES / 2]; }
    // The same bits.
    template <class U>
    explicit operator Pair<U>() const {
        return {(U)low, (U)high};
    }
    template <class U>
    Pair& operator+=(U other) {
        return *this = *this + other;
    }
    template <class U>
    Pair& operator-=(U other) {
        return *this = *this - other;
    }
    template <class U>
    Pair& operator*=(U other) {
        return *this = *this * other;
    }
    template <class U>
    Pair& operator|=(U other) {
        return *this = *this | other;
    }
};

typedef float EightFloats __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));
using Floats = Pair<EightFloats>;
using Ints = Pair<EightInts>;
using Words = Pair<EightWords>;
// What an instruction computes with.
using Vector = EightWords;
using FloatVector = EightFloats;
inline Vector first_vector(Words v) { return v.low; }

#define QUIRE_OPERATOR(op)                                                     \
    template <class V>                                                         \
    inline auto operator op(Pair<V> a, Pair<V> b) {                            \
        return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high}; \
    }                                                                          \
    template <class V>                                                         \
    inline auto operator op(Pair<V> a, typename Pair<V>::Element b) {          \
        return Pair<decltype(a.low op b)>{a.low op b, a.high op b};            \
    }                                                                          \
    template <class V>                                                         \
    inline auto operator op(typename Pair<V>::Element a, Pair<V> b) {          \
        return Pair<decltype(a op b.low)>{a op b.low, a op b.high};            \
    }
QUIRE_OPERATOR(+)
QUIRE_OPERATOR(-)
QUIRE_OPERATOR(*)
QUIRE_OPERATOR(/)
QUIRE_OPERATOR(&)
QUIRE_OPERATOR(|)
QUIRE_OPERATOR(<<)
QUIRE_OPERATOR(>>)
QUIRE_OPERATOR(<)
QUIRE_OPERATOR(<=)
QUIRE_OPERATOR(>)
QUIRE_OPERATOR(>=)
QUIRE_OPERATOR(==)
#undef QUIRE_OPERATOR
template <class V>
inline Pair<V> operator-(Pair<V> a) {
    return {-a.low, -a.high};
}
template <class V>
inline Pair<V> operator~(Pair<V> a) {
    return {~a.low, ~a.high};
}

constexpr Ints LANE = {{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}};

template <class V>
inline V load(const void* p) {
    V v;
    if constexpr (sizeof v == 4 * LANES)
        v = {load<decltype(v.low)>(p), load<decltype(v.low)>(static_cast<const char*>(p) + sizeof v.low)};
    else
        std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
inline void store(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}
template <class V>
inline void store(void* p, Pair<V> v) {
    store(p, v.low);
    store(static_cast<char*>(p) + sizeof v.low, v.high);
}
// The two halves may be apart.
inline Words load_words(const void* low, const void* high) { return {load<EightWords>(low), load<EightWords>(high)}; }

// x - 0 is x for every x, so the compiler leaves it out. x + 0 is not, for -0.
inline Floats splat(float x) { return {x - EightFloats{}, x - EightFloats{}}; }
inline Words splat(uint32_t x) { return {EightWords{} + x, EightWords{} + x}; }
inline Ints splat(int32_t x) { return {EightInts{} + x, EightInts{} + x}; }

// a where the condition holds, b elsewhere.
template <class C, class V>
inline Pair<V> select(Pair<C> condition, Pair<V> a, Pair<V> b) {
    return {condition.low ? a.low : b.low, condition.high ? a.high : b.high};
}
// Whether a comparison holds in some lane.
inline bool any(Ints comparison) { return _mm256_movemask_ps((__m256)(comparison.low | comparison.high)) != 0; }

inline Floats to_floats(Ints v) {
    return {__builtin_convertvector(v.low, EightFloats), __builtin_convertvector(v.high, EightFloats)};
}
// Towards zero.
inline Ints to_ints(Floats v) { return {__builtin_convertvector(v.low, EightInts), __builtin_convertvector(v.high, EightInts)}; }
inline Floats to_floats(Bytes v) {
    const __m128i bytes = (__m128i)v;
    return to_floats(Ints{(EightInts)_mm256_cvtepi8_epi32(bytes), (EightInts)_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
// Of numbers that fit.
inline Bytes to_bytes(Ints v) {
    // Each 128 bits are packed on their own: of both halves' first four lanes, then of both halves' last four.
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.low, (__m256i)v.high), 0b11011000);
    return (Bytes)_mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
inline Words to_words(Halves v) {
    const __m256i halves = (__m256i)v;
    return {(EightWords)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(halves)),
            (EightWords)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(halves, 1))};
}
// Of numbers that fit.
inline Halves to_halves(Words v) {
    return (Halves)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v.low, (__m256i)v.high), 0b11011000);
}

// Lanes 0 to 7 of both, alternating; and lanes 8 to 15.
inline Words interleave(EightWords a, EightWords b) {
    return {__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11), __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)};
}
inline Words interleave_low(Words a, Words b) { return interleave(a.low, b.low); }
inline Words interleave_high(Words a, Words b) { return interleave(a.high, b.high); }

// Combines each lane with the one half a vector away, then a quarter, and so on.
template <class F>
inline float reduce(Floats all, F&& join) {
    EightFloats v = join(all.low, all.high);
    v = join(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = join(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    v = join(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
    return v[0];
}
#else
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
using Vector = Words;
using FloatVector = Floats;
inline Vector first_vector(Words v) { return v; }

constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// As above.
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
inline Words load_words(const void* low, const void* high) {
    Words both;
    std::memcpy(&both, low, sizeof both / 2);
    std::memcpy(reinterpret_cast<char*>(&both) + sizeof both / 2, high, sizeof both / 2);
    return both;
}
// x - 0 is x for every x, so the compiler leaves it out. x + 0 is not, for -0.
inline Floats splat(float x) { return x - Floats{}; }
inline Words splat(uint32_t x) { return Words{} + x; }
inline Ints splat(int32_t x) { return Ints{} + x; }
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
inline Ints to_ints(Floats v) { return __builtin_convertvector(v, Ints); }
inline Floats to_floats(Bytes v) {
#ifdef __AVX512F__
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)v));
#else
    return __builtin_convertvector(v, Floats);
#endif
}
inline Bytes to_bytes(Ints v) { return __builtin_convertvector(v, Bytes); }
inline Words to_words(Halves v) {
#ifdef __AVX512F__
    return (Words)_mm512_cvtepu16_epi32((__m256i)v);  // GCC converts the halves one by one
#else
    return __builtin_convertvector(v, Words);
#endif
}
inline Halves to_halves(Words v) { return __builtin_convertvector(v, Halves); }
inline Words interleave_low(Words a, Words b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Words interleave_high(Words a, Words b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
template <class F>
inline float reduce(Floats v, F&& join) {
    v = join(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = join(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = join(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = join(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}
inline bool any(Ints comparison) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)comparison, (__m512i)comparison) != 0;
#else
    const auto join = [](Floats a, Floats b) { return a > b ? a : b; };
    return reduce(to_floats(-comparison), join) > 0;
#endif
}
#endif

// Of vectors of the compiler's, too.
template <class C, class V>
inline V select(C condition, V a, V b) {
    return condition ? a : b;
}

}  // namespace quire
