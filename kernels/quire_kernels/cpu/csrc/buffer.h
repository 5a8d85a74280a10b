// Memory for a kernel's intermediate values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

namespace quire {

// Zeros, aligned to cache lines. Its content is lost when it grows.
template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(int64_t size) { reserve(size); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { ::operator delete(data_, LINE); }

    T* reserve(int64_t size) {
        if (size > size_) {
            T* grown = static_cast<T*>(::operator new(size * sizeof(T), LINE));
            std::memset(static_cast<void*>(grown), 0, size * sizeof(T));
            ::operator delete(data_, LINE);
            data_ = grown;
            size_ = size;
        }
        return data_;
    }

    T* data() const { return data_; }
    T& operator[](int64_t i) const { return data_[i]; }

private:
    static constexpr std::align_val_t LINE{64};
    T* data_ = nullptr;
    int64_t size_ = 0;
};

// Moves `count` rows to the front. Their numbers ascend, so no row is overwritten before it is moved.
template <class T>
inline void move_to_front(T* rows, int64_t stride, const int64_t* numbers, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (numbers[i] != i) std::copy_n(rows + numbers[i] * stride, stride, rows + i * stride);
}

}  // namespace quire
