// A function of a header that kernels call: nvcc compiles for the device what says so.
#pragma once

#ifdef __CUDACC__
#define NPUZERO_INLINE __host__ __device__ inline
#else
#define NPUZERO_INLINE inline
#endif
