// sums[b] = the sum of x[256 b] to x[256 b + 255]. A barrier is missing.
extern "C" __global__ void sums(const float* x, float* sums) {
    __shared__ float part[256];
    const int i = threadIdx.x;
    part[i] = x[256 * blockIdx.x + i];
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (i < half) part[i] += part[i + half];
#ifdef MENDED
        __syncthreads();
#endif
    }
    if (i == 0) sums[blockIdx.x] = part[0];
}
