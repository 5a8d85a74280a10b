// Attention allocates no memory once the threads of the pool run: a failure there would end the process.
#include <cstdio>
#include <cstdlib>
#include <new>

#include "attention.h"

namespace {

bool refuses = false;

void* allocate(size_t size, size_t alignment) {
    void* memory = refuses ? nullptr : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (!memory) throw std::bad_alloc();
    return memory;
}

}  // namespace

void* operator new(size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(size_t size, const std::nothrow_t&) noexcept { return refuses ? nullptr : std::malloc(size); }
void* operator new(size_t size, std::align_val_t alignment) { return allocate(size, static_cast<size_t>(alignment)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

using namespace quire;

namespace {

constexpr int64_t BLOCK = 16, DIM = 64, TOKENS = 16;

// Of the only sequence, whose keys and values are in one block.
template <class T>
void attend_to_block(ThreadPool& pool, bool has_codes, bool is_shared) {
    const int64_t half = BLOCK * DIM, value_dim = is_shared ? DIM / 2 : 0;
    Buffer<T> numbers(2 * half), query(TOKENS * DIM);
    Buffer<float> scales(2 * BLOCK), output(TOKENS * DIM);
    const Cache cache{reinterpret_cast<char*>(numbers.data()), 0, is_shared ? 0 : half, 1, BLOCK, DIM,
                      has_codes ? reinterpret_cast<char*>(scales.data()) : nullptr};
    const int32_t table[] = {0}, starts[] = {0, TOKENS}, lengths[] = {TOKENS};
    const Sequences sequences{1, 1, table, starts, lengths};
    const std::vector<Tile> tiles = split_into_tiles(sequences, 1, 1, pool.size());
    TileAttention<T> first(1, DIM, value_dim, has_codes), second(1, DIM, value_dim, has_codes);
    const std::function<void(int)> work = [&](int thread) {
        attend(pool, thread ? second : first, cache, sequences, tiles, {1.0f, 0.0f, 0, 0, nullptr}, query.data(), put_in(output.data(), DIM));
    };
    refuses = true;
    pool.run(work);
    refuses = false;
}

}  // namespace

int main() {
    ThreadPool pool(2);
    for (const bool has_codes : {false, true})
        for (const bool is_shared : {false, true}) {
            attend_to_block<float>(pool, has_codes, is_shared);
            attend_to_block<BFloat16>(pool, has_codes, is_shared);
        }
    std::puts("no memory was needed");
}
