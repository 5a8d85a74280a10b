// The paged cache of keys and values, and how a token's are written to it.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "codes.h"
#include "simd.h"

namespace quire {

// One layer of the cache: block b at data + b * block_stride bytes, its keys [kv_heads][head_dim][block_size], and value_offset
// numbers after them its values [kv_heads][block_size][head_dim]. Where value_offset is 0, all heads share the keys of one, which
// are the values too.
//
// With scales, these are codes in 8 bits in the same order, and at scales + b * block_stride bytes are the scales of the keys
// [kv_heads][block_size], then those of the values.
struct Cache {
    char* data;
    int64_t block_stride;
    int64_t value_offset;
    int64_t num_kv_heads;
    int64_t block_size;
    int64_t head_dim;
    char* scales;  // or null

    bool is_shared() const { return value_offset == 0; }
    bool has_codes() const { return scales != nullptr; }
    // Of numbers T, or int8_t where these are codes.
    template <class T>
    T* keys(int64_t block, int64_t head) const {
        return reinterpret_cast<T*>(data + block * block_stride) + (is_shared() ? 0 : head * block_size * head_dim);
    }
    template <class T>
    T* values(int64_t block, int64_t head) const {
        return keys<T>(block, head) + value_offset;
    }
    float* key_scales(int64_t block, int64_t head) const {
        return reinterpret_cast<float*>(scales + block * block_stride) + (is_shared() ? 0 : head * block_size);
    }
    float* value_scales(int64_t block, int64_t head) const {
        return key_scales(block, head) + (is_shared() ? 0 : num_kv_heads * block_size);
    }
};

// Writes `count` numbers of a key to a block of so many tokens. V of them are neighbours, as in a lane of the products.
template <int V, class U>
inline void put_key(U* to, const U* numbers, int64_t count, int64_t block_size) {
    for (int64_t d = 0; d < count; d += V) std::memcpy(to + d * block_size, numbers + d, V * sizeof(U));
}

// The same of a value, of which V tokens are neighbours.
template <int V, class U>
inline void put_value(U* to, const U* numbers, int64_t count) {
    for (int64_t d = 0; d < count; ++d) to[d * V] = numbers[d];
}

// A token's place in the cache.
struct Slot {
    int64_t block, offset;  // -1, -1: it is not stored

    Slot(int64_t slot, int64_t block_size) : block(slot < 0 ? -1 : slot / block_size), offset(slot < 0 ? -1 : slot % block_size) {}
    bool exists() const { return block >= 0; }
};

// Of `count` tokens.
inline void locate_slots(const int64_t* slots, int64_t count, int64_t block_size, std::vector<Slot>& located) {
    located.clear();
    for (int64_t i = 0; i < count; ++i) located.emplace_back(slots[i], block_size);
}

// Whether a token, not the first, is not stored in the cache lines of the one before it: then two threads can store them at the same
// time without waiting for each other.
inline bool begins_lines(const Slot* slots, int64_t token) {
    const Slot slot = slots[token], before = slots[token - 1];
    return !slot.exists() || slot.block != before.block || slot.offset / LANES != before.offset / LANES;
}

// Stores numbers of a token's key of one head, those from dimension `first` on, in a cache without codes.
template <class T>
inline void store_key_part(const Cache& cache, Slot slot, int64_t head, int64_t first, const T* numbers, int64_t count) {
    constexpr int V = Lane<T>::VALUES;
    put_key<V>(cache.keys<T>(slot.block, head) + slot.offset * V + first * cache.block_size, numbers, count, cache.block_size);
}

// Where a value's numbers begin in its block, V tokens beside each other.
template <int V>
inline int64_t place_of_value(const Cache& cache, Slot slot) {
    return slot.offset / V * V * cache.head_dim + slot.offset % V;
}

// As store_key_part, of its value.
template <class T>
inline void store_value_part(const Cache& cache, Slot slot, int64_t head, int64_t first, const T* numbers, int64_t count) {
    constexpr int V = Lane<T>::VALUES;
    put_value<V>(cache.values<T>(slot.block, head) + place_of_value<V>(cache, slot) + first * V, numbers, count);
}

// Calls put(d, codes) for each LANES codes of a key or value, and returns the scale.
template <class T, class P>
inline float quantize_vector(const T* numbers, int64_t count, P&& put) {
    return quantize_group(count, [&](int64_t d) { return load_floats(numbers + d); }, [&](int64_t d, Bytes codes) {
        int8_t stored[LANES];
        store(stored, codes);
        put(d, stored);
    }).scale;
}

// Stores a token's key [head_dim] of one head.
template <class T>
inline void store_key(const Cache& cache, Slot slot, int64_t head, const T* key) {
    constexpr int V = Lane<T>::VALUES;
    if (!cache.has_codes()) return store_key_part(cache, slot, head, 0, key, cache.head_dim);
    const int64_t size = cache.block_size;
    int8_t* to = cache.keys<int8_t>(slot.block, head) + slot.offset * V;
    cache.key_scales(slot.block, head)[slot.offset] = quantize_vector(
        key, cache.head_dim, [&](int64_t d, const int8_t* codes) { put_key<V>(to + d * size, codes, LANES, size); });
}

// Stores a token's key and value [head_dim] of one head.
template <class T>
inline void store_token(const Cache& cache, Slot slot, int64_t head, const T* key, const T* value) {
    constexpr int V = Lane<T>::VALUES;
    store_key(cache, slot, head, key);
    if (!cache.has_codes()) return store_value_part(cache, slot, head, 0, value, cache.head_dim);
    int8_t* to = cache.values<int8_t>(slot.block, head) + place_of_value<V>(cache, slot);
    cache.value_scales(slot.block, head)[slot.offset] = quantize_vector(
        value, cache.head_dim, [&](int64_t d, const int8_t* codes) { put_value<V>(to + d * V, codes, LANES); });
}

}  // namespace quire
