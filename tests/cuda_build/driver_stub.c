/* libcuda.so.1 for machines without a driver: vLLM's op libraries load against it. Every call that would need a device
   fails with CUDA_ERROR_NO_DEVICE. */
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, void *status) {
    *found = 0;
    return 100;
}
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) { return 100; }
int cuTensorMapEncodeTiled(void) { return 100; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = 0; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return 100; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return 100; }
int cuGetErrorString(int error, const char **text) { *text = "no device: this is a stub"; return 0; }
int cuMemAddressFree(void) { return 100; }
int cuMemAddressReserve(void) { return 100; }
int cuMemCreate(void) { return 100; }
int cuMemGetAllocationGranularity(void) { return 100; }
int cuMemMap(void) { return 100; }
int cuMemRelease(void) { return 100; }
int cuMemSetAccess(void) { return 100; }
int cuMemUnmap(void) { return 100; }
