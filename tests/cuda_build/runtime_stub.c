/* The calls of the CUDA runtime that PyTorch and vLLM make around an operation, for one device of compute capability
   9.0. Preloaded, so that these come before the runtime's own. */
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *capturing) { *capturing = 0; return 0; }
int cudaGetDriverEntryPoint(const char *name, void **found, unsigned long long flags, void *status) {
    *found = 0;
    return 0;
}
