// A CUDA runtime with no GPU behind it. A program that nvcc compiled, host code and all, is loaded into a Python process
// and finds this library's functions in place of libcudart's and libcuda's: device memory is the process's own, streams
// run at once, and what needs a device (launching a kernel, encoding a tensor map) is handed to Python by callbacks.
// tests/foreign_programs.py is the other half. Only what the programs run so far call is here.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*launch_t)(const char *name, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned cx, unsigned cy, unsigned cz, size_t shared_bytes, void **arguments);
typedef int (*encode_t)(void *map, int type, unsigned rank, void *address, const cuuint64_t *dims,
                        const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, int interleave,
                        int swizzle, int promotion, int fill);
typedef void (*memory_t)(void *address, size_t size);  // size 0: freed

static launch_t launch_cb;
static encode_t encode_cb;
static memory_t memory_cb;
static int capability_major, num_sms;

void padless_callbacks(launch_t launch, encode_t encode, memory_t memory, int major, int sms) {
  launch_cb = launch, encode_cb = encode, memory_cb = memory, capability_major = major, num_sms = sms;
}

// ---- what nvcc's generated code calls
static struct {
  const void *host;
  char *name;
  size_t shared_bytes;
} functions[65536];
static int num_functions;

void **__cudaRegisterFatBinary(void *binary) { return (void **)binary; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 0; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b,
                            void *c, void *d, int *e) {
  functions[num_functions].host = host;
  functions[num_functions++].name = strdup(name);
}
cudaError_t __cudaGetKernel(void **kernel, const void *host) {
  *kernel = (void *)host;
  return cudaSuccess;
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size, int constant,
                       int global) {}

static __thread struct {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st *stream) {
  pushed.grid = grid, pushed.block = block, pushed.shared_bytes = shared_bytes, pushed.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  *grid = pushed.grid, *block = pushed.block, *shared_bytes = pushed.shared_bytes;
  *(cudaStream_t *)stream = pushed.stream;
  return cudaSuccess;
}

static cudaError_t last_error = cudaSuccess;

static cudaError_t launch(const void *host, dim3 g, dim3 b, dim3 c, void **arguments, size_t shared_bytes) {
  for (int i = 0; i < num_functions; i++)
    if (functions[i].host == host) {
      int bad = launch_cb(functions[i].name, g.x, g.y, g.z, b.x, b.y, b.z, c.x, c.y, c.z, shared_bytes, arguments);
      return last_error = bad ? cudaErrorLaunchFailure : cudaSuccess;
    }
  fprintf(stderr, "launch of an unknown function %p\n", host);
  return last_error = cudaErrorInvalidDeviceFunction;
}
cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  dim3 none = {0, 0, 0};
  return launch(host, grid, block, none, arguments, shared_bytes);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t host, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                               cudaStream_t stream) {
  return cudaLaunchKernel(host, grid, block, arguments, shared_bytes, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments) {
  dim3 cluster = {0, 0, 0};
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      cluster.x = config->attrs[i].val.clusterDim.x;
      cluster.y = config->attrs[i].val.clusterDim.y;
      cluster.z = config->attrs[i].val.clusterDim.z;
    }
  return launch(host, config->gridDim, config->blockDim, cluster, arguments, config->dynamicSmemBytes);
}

// ---- memory
cudaError_t cudaMalloc(void **address, size_t size) {
  *address = NULL;
  if (size == 0) return cudaSuccess;
  if (posix_memalign(address, 1024, size)) return last_error = cudaErrorMemoryAllocation;
  memset(*address, 0xFF, size);  // reads of what nothing wrote give NaN
  memory_cb(*address, size);
  return cudaSuccess;
}
cudaError_t cudaFree(void *address) {
  if (address) {
    memory_cb(address, 0);
    free(address);
  }
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t stream) { return cudaMalloc(address, size); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }
cudaError_t cudaMallocHost(void **address, size_t size) { return cudaMalloc(address, size); }
cudaError_t cudaMallocManaged(void **address, size_t size, unsigned flags) { return cudaMalloc(address, size); }
cudaError_t cudaFreeHost(void *address) { return cudaFree(address); }
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t i = 0; i < height; i++) memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t size) {
  memset(to, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { return cudaMemset(to, value, size); }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeDevice;
  attributes->devicePointer = attributes->hostPointer = (void *)address;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *available = *total = (size_t)64 << 30;
  return cudaSuccess;
}

// ---- the device
cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "emulator");
  p->major = capability_major, p->multiProcessorCount = num_sms, p->warpSize = 32;
  p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 227 << 10, p->sharedMemPerMultiprocessor = 228 << 10;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->regsPerBlock = 65536;
  p->regsPerMultiprocessor = 65536, p->maxGridSize[0] = 0x7FFFFFFF, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = num_sms; break;
    case cudaDevAttrComputeCapabilityMajor: *value = capability_major; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7FFFFFFF; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *host) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 64;
  attributes->ptxVersion = attributes->binaryVersion = 10 * capability_major;
  attributes->maxDynamicSharedSizeBytes = 227 << 10;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int size, size_t shared,
                                                                   unsigned flags) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int size, size_t shared) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *host, const cudaLaunchConfig_t *config) {
  *clusters = num_sms;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

// ---- errors, streams, events
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t error) { return error ? "error in the emulated launch" : "no error"; }
const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
cudaError_t cudaDeviceSynchronize(void) { return last_error; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return last_error; }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return *stream = NULL, cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return *stream = NULL, cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = NULL, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return *event = NULL, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return *milliseconds = 1, cudaSuccess;
}

// ---- the driver
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return encode_cb(map, type, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill)
             ? CUDA_ERROR_INVALID_VALUE
             : CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  for (size_t i = 0; i < count; i++) ((unsigned *)to)[i] = value;
  return CUDA_SUCCESS;
}
CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  for (size_t i = 0; i < count; i++) ((unsigned short *)to)[i] = value;
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  memset((void *)to, value, count);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "driver error", CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
  *function = !strcmp(symbol, "cuTensorMapEncodeTiled") ? (void *)cuTensorMapEncodeTiled : NULL;
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*function) fprintf(stderr, "the driver's %s is not modelled\n", symbol);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 13000, flags, status);
}
