// From accumulators to global memory: O through shared memory and TMA, LSE and partial sums straight.
#pragma once

#include "../common/gate.cuh"
#include "tile.cuh"

namespace videoattn::hopper {

// Byte address of the 16-byte piece that lane `lane` hands to ldmatrix or stmatrix .x4 for the 16 x 16 block at
// (row, 16 * step) of a swizzled [head_dim / 64][kRows][64] tile.
template <int kRows>
__device__ __forceinline__ uint32_t fragment_address(uint32_t tile, int row, int lane, int step) {
    row += lane % 16;
    const int piece = 2 * (step % 4) + lane / 16;
    return tile + (step / 4) * (kRows * 128) + row * 128 + ((piece ^ (row & 7)) << 4);
}

// The thread's number. What is computed from it is computed anew: the compiler would keep it from one tile to the next,
// in registers that there are not.
__device__ __forceinline__ uint32_t fresh_thread() {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

// What a consumer's threads write of a tile; `group` is the consumer.
template <typename C, typename Element>
struct Rows {
    static constexpr int kOutputs = C::kHeadDim / 2;

    const Args& args;
    const Tile& tile;
    const int group;

    // The thread's query row: `row` 0 or 1 of its two.
    __device__ __forceinline__ int position(int row) const {
        const int thread = threadIdx.x % 128;
        return tile.row + group * kGroupRows + thread / 32 * 16 + thread % 32 / 4 + 8 * row;
    }

    // Index of a query row among all rows, `split`s outermost.
    __device__ __forceinline__ int64_t flat_row(int position) const {
        const int64_t pair = static_cast<int64_t>(tile.split * args.batch + tile.batch) * args.heads.value + tile.head;
        return pair * args.q_len + position;
    }

    __device__ __forceinline__ void write_lse(int row, float value) const {
        const int query = position(row);
        if (args.lse == nullptr || threadIdx.x % 4 != 0 || query >= args.q_len) return;
        args.lse[flat_row(query)] = value;
    }

    __device__ __forceinline__ void write_partial(const float (&o)[kOutputs], const float (&inverse)[2]) const {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int query = position(row);
            if (query >= args.q_len) continue;
            float* target = args.partial_out + flat_row(query) * C::kHeadDim + 2 * (threadIdx.x % 4);
#pragma unroll
            for (int block = 0; block < C::kHeadDim / 8; ++block)
                *reinterpret_cast<float2*>(target + 8 * block) =
                    make_float2(o[4 * block + 2 * row] * inverse[row], o[4 * block + 2 * row + 1] * inverse[row]);
        }
    }

    // Zeros and LSE -inf: a tile without keys.
    __device__ __forceinline__ void write_empty() const {
        for (int row = 0; row < 2; ++row) write_lse(row, -INFINITY);
        if (args.splits.value > 1) {
            const float o[kOutputs] = {}, inverse[2] = {};
            write_partial(o, inverse);
            return;
        }
        constexpr int kPieces = C::kHeadDim / 8;
#pragma unroll
        for (int i = 0; i < kGroupRows * kPieces / 128; ++i) {
            const int piece = 128 * i + threadIdx.x % 128;
            const int query = tile.row + group * kGroupRows + piece / kPieces;
            if (query >= args.q_len) continue;
            Element* target = at<Element>(args.out, tile, query) + piece % kPieces * 8;
            *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
        }
    }

    // Where in the consumer's buffer a warp's rows wait for their way out.
    static __device__ __forceinline__ uint32_t own(uint32_t buffer, int warp) {
        return buffer + warp * (kWarpRows * C::kHeadDim * 2);
    }

    // The warp's rows, scaled, rounded and, if kGated, times their gates, into a swizzled tile in shared memory.
    template <bool kGated>
    __device__ __forceinline__ void stage(uint32_t buffer, const float (&o)[kOutputs], const float (&inverse)[2],
                                          uint32_t gates = 0) const {
        const uint32_t thread = fresh_thread();
        const int warp = thread % 128 / 32, lane = thread % 32;
        uint32_t gate[2];
        if constexpr (kGated) {
#pragma unroll
            for (int row = 0; row < 2; ++row)
                gate[row] = load_shared(gates + 4 * (warp * kWarpRows + lane / 4 + 8 * row));
        }
#pragma unroll
        for (int step = 0; step < C::kHeadDim / 16; ++step) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                r[i] = pack<Element>(o[8 * step + 2 * i] * inverse[i % 2], o[8 * step + 2 * i + 1] * inverse[i % 2]);
                if constexpr (kGated) r[i] = multiply<Element>(r[i], gate[i % 2]);
            }
            stmatrix_x4(fragment_address<kWarpRows>(own(buffer, warp), 0, lane, step), r[0], r[1], r[2], r[3]);
        }
    }

    __device__ __forceinline__ void send(uint32_t buffer, const CUtensorMap& o_map) const {
        const int warp = fresh_thread() % 128 / 32;
        const int row = tile.row + group * kGroupRows + warp * kWarpRows;
        if (row >= args.q_len) return;
        tma_store(&o_map, own(buffer, warp), row, tile.head, tile.batch);
        bulk_commit_group();
    }
};

}  // namespace videoattn::hopper
