/* A CUDA driver that does nothing, for Triton's own C code on a machine without a GPU. */
#include <stdint.h>

int launches = 0;   /* kernels that were queued */
int programs = 0;   /* of the last one */
int has_context = 1; /* whether the thread has one; else no tensor map is made */

int cuLaunchKernelEx(const unsigned *config, void *function, void **arguments, void **extra) {
  launches += 1;
  programs = config[0];
  return 0;
}

int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuModuleLoadData(void **module, const void *data) { *module = (void *)2; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)3;
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 1024; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "an error"; return 0; }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t address) {
  *value = address;
  return 0;
}

int cuCtxGetLimit(void) { return 0; }
int cuCtxSetCurrent(void) { return 0; }
int cuCtxSetLimit(void) { return 0; }
int cuDeviceGet(void) { return 0; }
int cuDevicePrimaryCtxRetain(void) { return 0; }
int cuFuncSetAttribute(void) { return 0; }
int cuFuncSetCacheConfig(void) { return 0; }
int cuOccupancyMaxActiveClusters(void) { return 0; }
int cuTensorMapEncodeTiled(void) { return has_context ? 0 : 201; }
