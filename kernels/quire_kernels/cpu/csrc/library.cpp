// The functions that Python calls through ctypes: plain C, no header of Python or torch.
// The caller frees thread pools and models that it made. Arguments are checked by callers. A function returns null or not 0
// where memory or threads run out: all that may fail so is done before the pool's threads start.

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>

#include "amx.h"
#include "amx_codes.h"
#include "attention.h"
#include "decoder.h"
#include "encoder.h"
#include "experts.h"
#include "linear.h"
#include "sample.h"
#include "thread_pool.h"

namespace {

using namespace quire;

enum class Type : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

template <class F>
auto with_type(Type type, F&& f) {
    return type == Type::BFLOAT16 ? f(BFloat16{}) : f(float{});
}

// Runs f and returns whether it threw: no exception may cross into C.
template <class F>
int64_t guarded(F&& f) noexcept {
    try {
        f();
        return 0;
    } catch (...) {
        return 1;
    }
}

template <class F>
void* create(F&& f) noexcept {
    void* object = nullptr;
    return guarded([&] { object = f(); }) ? nullptr : object;
}

// Lays out one panel: of each of its `outputs` rows, `row_bytes` long, in each step the next UNIT bytes. Beyond them it has zeros.
template <size_t UNIT>
void pack_panel(const char* rows, int64_t outputs, int64_t row_bytes, int64_t steps, char* panel) {
    const int64_t whole_steps = row_bytes / UNIT;
    std::fill_n(panel, steps * PANEL * UNIT, char{});
    for (int64_t step = 0; step < whole_steps; ++step)
        for (int64_t output = 0; output < outputs; ++output)
            std::memcpy(panel + (step * PANEL + output) * UNIT, rows + output * row_bytes + step * UNIT, UNIT);
    for (int64_t output = 0; output < outputs; ++output)
        std::copy_n(rows + output * row_bytes + whole_steps * UNIT, row_bytes - whole_steps * UNIT,
                    panel + (whole_steps * PANEL + output) * UNIT);
}

// Calls f for each panel of so many outputs, on all threads.
template <class F>
int64_t in_panels(void* pool, int64_t outputs, F&& f) noexcept {
    ThreadPool& threads = *static_cast<ThreadPool*>(pool);
    return guarded([&] { threads.run([&](int) { threads.parallel_for_ranges(ceil_div(outputs, PANEL), f); }); });
}

}  // namespace

extern "C" {

void* quire_thread_pool_new(int64_t size) {
    return create([&] { return new ThreadPool(static_cast<int>(size)); });
}
void quire_thread_pool_delete(void* pool) { delete static_cast<ThreadPool*>(pool); }

// Panels of a weight [outputs, row_bytes], with zeros beyond the last input. A panel has `steps`, each of which holds `unit` bytes of
// an output, 1, 2 or 4.
int64_t quire_pack(void* pool, const char* weight, int64_t outputs, int64_t row_bytes, int64_t unit, int64_t steps, char* panels) {
    return in_panels(pool, outputs, [&](int64_t panel) {
        const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, outputs - first);
        const auto pack = unit == 1 ? pack_panel<1> : unit == 2 ? pack_panel<2> : pack_panel<4>;
        pack(weight + first * row_bytes, count, row_bytes, steps, panels + first * steps * unit);
    });
}

// Codes uint8 [outputs, inputs], scales and zero points float32 [outputs, groups] of a weight [outputs, inputs] of the type.
int64_t quire_quantize_nibbles(void* pool_, Type type, const void* weight, int64_t outputs, int64_t inputs, int64_t group,
                               uint8_t* codes, float* scales, float* zeros) {
    return guarded([&] {
        ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
        const int64_t num_groups = ceil_div(inputs, group);
        with_type(type, [&](auto zero) {
            using T = decltype(zero);
            pool.run([&](int) {
                pool.parallel_for_ranges(outputs, [&](int64_t output) {
                    for (int64_t i = 0; i < num_groups; ++i) {
                        const int64_t first = output * inputs + i * group, number = output * num_groups + i;
                        quantize_to_nibbles(static_cast<const T*>(weight) + first, std::min(group, inputs - i * group), codes + first,
                                            scales + number, zeros + number);
                    }
                });
            });
        });
    });
}

// Panels of a matrix in W4, of codes uint8 [outputs, inputs], and scales and zero points [outputs, groups] in float16.
int64_t quire_pack_nibbles(void* pool, const uint8_t* codes, const uint16_t* scales, const uint16_t* zeros, const Matrix* matrix,
                           int64_t inputs, uint8_t* panels) {
    return in_panels(pool, matrix->outputs, [&](int64_t panel) { pack_nibbles(codes, scales, zeros, *matrix, inputs, panel, panels); });
}

// Panels of a matrix in grouped W8, of codes int8 [outputs, inputs], and scales [outputs, groups] in float16; minimums too, or null.
int64_t quire_pack_grouped_bytes(void* pool, const int8_t* codes, const uint16_t* scales, const uint16_t* minimums, const Matrix* matrix,
                                 int64_t inputs, uint8_t* panels) {
    return in_panels(pool, matrix->outputs,
                     [&](int64_t panel) { pack_grouped_bytes(codes, scales, minimums, *matrix, inputs, panel, panels); });
}

// output [rows, outputs] float32 = input [rows, stride] of the type, of which [rows, inputs] count, zeros beside them up to a
// multiple of LANES.
int64_t quire_linear(void* pool_, Type type, const Matrix* matrix, const void* input, int64_t rows, int64_t stride,
                  float* output) {
    return guarded([&] {
        ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
        with_type(type, [&](auto zero) {
            using T = decltype(zero);
            const auto* from = static_cast<const T*>(input);
            const auto put = [&](int64_t row, int64_t panel, Floats left, Floats right) {
                put_outputs(*matrix, panel, left, right, output + row * matrix->outputs);
            };
            if (matrix->takes_codes()) {
                CodeRows code_rows;
                code_rows.reserve(rows, code_row_bytes(*matrix));
                return pool.run([&](int) { multiply_in_codes<VectorFactors<T>>(pool, *matrix, code_rows, from, rows, stride, put); });
            }
            const int64_t size = VectorFactors<T>::scratch_size(matrix->inputs);
            Buffer<T> scratch(size * pool.size()), ordered(matrix->order ? rows * stride : 0);
            pool.run([&](int thread) {
                if (matrix->order) put_in_order(pool, *matrix, from, rows, stride, ordered.data());
                const T* inputs = matrix->order ? ordered.data() : from;
                multiply(pool, *matrix, inputs, rows, stride, scratch.data() + thread * size, put);
            });
        });
    });
}

// Stores keys and values [tokens, kv_heads, head_dim], the rows at strides, in the slots of one layer's cache.
int64_t quire_store(void* pool_, Type type, const Cache* cache, const void* key, int64_t key_stride,
                 const void* value, int64_t value_stride, const int64_t* slots, int64_t tokens) {
    return guarded([&] {
        ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
        std::vector<Slot> located;
        locate_slots(slots, tokens, cache->block_size, located);
        with_type(type, [&](auto zero) {
            using T = decltype(zero);
            pool.run([&](int) {
                pool.parallel_for_ranges(tokens, [&](int64_t i) { return begins_lines(located.data(), i); }, [&](int64_t token) {
                    if (!located[token].exists()) return;
                    for (int64_t head = 0; head < cache->num_kv_heads; ++head)
                        store_token(*cache, located[token], head,
                                    static_cast<const T*>(key) + token * key_stride + head * cache->head_dim,
                                    static_cast<const T*>(value) + token * value_stride + head * cache->head_dim);
                });
            });
        });
    });
}

// Attention of queries [tokens, kv_heads * group, head_dim] over one layer's cache; with `use_amx` by its registers.
int64_t quire_attend(void* pool_, Type type, [[maybe_unused]] int64_t use_amx, const Cache* cache, const Sequences* sequences,
                     const AttentionRule* rule, int64_t group, const void* query, void* output) {
    return guarded([&] {
        ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
        const auto run = [&]<class Product>() {
            using T = typename Product::Element;
            const std::vector<Tile> tiles = split_into_tiles(*sequences, cache->num_kv_heads, group, pool.size());
            std::deque<TileAttention<T, typename AttentionProductsOf<Product>::Type>> attentions;
            for (int i = 0; i < pool.size(); ++i) attentions.emplace_back(group, cache->head_dim, 0, cache->has_codes());
            pool.run([&](int thread) {
                const typename Product::Registers registers;
                attend(pool, attentions[thread], *cache, *sequences, tiles, *rule, static_cast<const T*>(query),
                       put_in(static_cast<T*>(output), cache->num_kv_heads * group * cache->head_dim));
            });
        };
#ifdef QUIRE_AMX
        if (use_amx) return run.template operator()<AmxFactors<1>>();
#endif
        type == Type::BFLOAT16 ? run.template operator()<VectorFactors<BFloat16>>() : run.template operator()<VectorFactors<float>>();
    });
}

// The argmax of each row of logits [rows, stride], of which [rows, vocab] count; -1 where one of them is not finite, or,
// with `suppressed`, where none is: some may be minus infinity.
int64_t quire_argmax(void* pool_, const float* logits, int64_t rows, int64_t stride, int64_t vocab, int64_t suppressed,
                     int64_t* tokens) {
    return guarded([&] {
        ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
        pool.run([&](int) {
            pool.parallel_for(rows, [&](int64_t row) {
                const float* from = logits + row * stride;
                tokens[row] = (suppressed ? find_argmax<true>(from, vocab) : find_argmax<false>(from, vocab)).token;
            });
        });
    });
}

// Masks `count` rows of logits in place, rows[i] with bits[i] of `words` words, and finds their argmax: -1 where no token is
// left, or one is NaN.
int64_t quire_mask_logits(void* pool_, float* logits, int64_t stride, int64_t vocab, const int64_t* rows, const uint32_t* bits,
                          int64_t words, int64_t count, int64_t* tokens) {
    return guarded([&] {
        ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
        pool.run([&](int) {
            pool.parallel_for(count, [&](int64_t i) {
                float* row = logits + rows[i] * stride;
                mask_logits(row, vocab, bits + i * words);
                tokens[i] = find_argmax<true>(row, vocab).token;
            });
        });
    });
}

// A token for each of `count` rows of logits, rows[i] sampled with draws[i]; -1 where none can be sampled.
int64_t quire_sample(void* pool_, const float* logits, int64_t stride, int64_t vocab, const int64_t* rows, const SamplingParams* params,
                int64_t count, int64_t* tokens) {
    return guarded([&] {
        ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
        std::deque<Sampler> samplers;
        for (int i = 0; i < pool.size(); ++i) samplers.emplace_back(vocab);
        pool.run([&](int thread) {
            Sampler& own = samplers[thread];
            pool.parallel_for(count, [&](int64_t i) { tokens[i] = own.sample(logits + rows[i] * stride, params[i]); });
        });
    });
}

// Log-probabilities [rows, 1 + count] of each row's token and of its top tokens `ids` [rows, count].
int64_t quire_top_logprobs(void* pool_, const float* logits, int64_t rows, int64_t stride, int64_t vocab, const int64_t* tokens,
                int64_t count, float* logprobs, int64_t* ids) {
    return guarded([&] {
        ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
        pool.run([&](int) {
            pool.parallel_for(rows, [&](int64_t row) {
                top_logprobs(logits + row * stride, vocab, tokens[row], count, logprobs + row * (1 + count), ids + row * count);
            });
        });
    });
}

// Adds the outputs of experts for `rows` rows of the type, padded with zeros to a stride of whole panels, to output
// [rows, stride] float32.
int64_t quire_experts(void* pool_, Type type, [[maybe_unused]] int64_t use_amx, const Experts* experts, const void* rows,
                      int64_t num_rows, float* output) {
    return guarded([&] {
        ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
        const auto run = [&]<class Product>() {
            using Element = typename Product::Element;
            ExpertMixture<Product> mixture(pool);
            mixture.include(*experts);
            mixture.reserve(num_rows);
            Buffer<Element> scratch(mixture.scratch_size() * pool.size());
            const int64_t columns = round_up(experts->router.inputs, PANEL), stride = Product::stride(columns);
            // Products read whole tiles of rows.
            Buffer<Element> padded(round_up(num_rows, Product::ROWS) * stride);
            for (int64_t row = 0; row < num_rows; ++row)
                std::copy_n(static_cast<const Element*>(rows) + row * columns, columns, &padded[row * stride]);
            pool.run([&](int thread) {
                const typename Product::Registers registers;
                mixture.add(*experts, padded.data(), padded.data(), num_rows, output, columns, false,
                            &scratch[thread * mixture.scratch_size()]);
            });
        };
#ifdef QUIRE_AMX
        if (use_amx) return run.template operator()<AmxFactors<1>>();
#endif
        type == Type::BFLOAT16 ? run.template operator()<VectorFactors<BFloat16>>()
                               : run.template operator()<VectorFactors<float>>();
    });
}

void* quire_decoder_new(void* pool, Type type, int64_t use_amx, const DecoderModel* model) {
    return create([&] {
        ThreadPool& threads = *static_cast<ThreadPool*>(pool);
        return make_decoder(type == Type::BFLOAT16, use_amx != 0, *model, threads).release();
    });
}

void quire_decoder_delete(void* decoder) { delete static_cast<AnyDecoder*>(decoder); }

int64_t quire_decoder_run(void* decoder, const DecoderStep* step) {
    return guarded([&] { static_cast<AnyDecoder*>(decoder)->run(*step); });
}

// Whether quire_amx_linear may be called, and other functions with `use_amx`: callers check it.
int64_t quire_has_amx() { return may_use_amx(); }

// As quire_linear, of an input [rows, columns] float32 that is rounded to factors of the type, or to codes where the matrix takes
// them; columns a multiple of 32.
int64_t quire_amx_linear([[maybe_unused]] void* pool_, [[maybe_unused]] Type type, [[maybe_unused]] const Matrix* matrix,
                          [[maybe_unused]] const float* input, [[maybe_unused]] int64_t rows,
                          [[maybe_unused]] int64_t columns, [[maybe_unused]] float* output) {
#ifdef QUIRE_AMX
    return guarded([&] {
        ThreadPool& pool = *static_cast<ThreadPool*>(pool_);
        const auto put = [&](int64_t row, int64_t panel, Floats left, Floats right) {
            put_outputs(*matrix, panel, left, right, output + row * matrix->outputs);
        };
        if (matrix->takes_codes()) {
            CodeRows code_rows;
            code_rows.reserve(rows, code_row_bytes(*matrix));
            return pool.run([&](int) {
                const AmxRegisters registers;
                multiply_in_codes<AmxFactors<1>>(pool, *matrix, code_rows, input, rows, columns, put);
            });
        }
        const auto run = [&]<class Product>() {
            const int64_t stride = Product::stride(columns), size = Product::scratch_size(columns);
            Buffer<BFloat16> factors(round_up(rows, Product::ROWS) * stride), scratch(size * pool.size());
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t i = 0; i < columns; i += LANES)
                    Product::put(&factors[row * stride], i, load_floats(input + row * columns + i));
            pool.run([&](int thread) {
                const typename Product::Registers registers;
                Product::multiply(pool, *matrix, {factors.data(), stride}, rows, &scratch[thread * size], put);
            });
        };
        type == Type::BFLOAT16 ? run.template operator()<AmxFactors<1>>() : run.template operator()<AmxFactors<2>>();
    });
#else
    std::abort();
#endif
}

void* quire_encoder_new(void* pool, Type type, int64_t use_amx, const EncoderModel* model) {
    return create([&] {
        ThreadPool& threads = *static_cast<ThreadPool*>(pool);
        return make_encoder(type == Type::BFLOAT16, use_amx != 0, *model, threads).release();
    });
}

void quire_encoder_delete(void* encoder) { delete static_cast<AnyEncoder*>(encoder); }

int64_t quire_encoder_run(void* encoder, const EncoderStep* step) {
    return guarded([&] { static_cast<AnyEncoder*>(encoder)->run(*step); });
}

}  // extern "C"
