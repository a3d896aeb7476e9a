/* Device memory that torch takes for a captured step, and that other processes can map: each piece an allocation of its own.

   Declared by hand, and found in the driver at run time, so that compiling this needs nothing but a C compiler. */

#include <dlfcn.h>
#include <stdint.h>
#include <sys/types.h>

enum { PINNED = 1, BY_FD = 1, ON_DEVICE = 1, READ_WRITE = 3 };
typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *meta; unsigned char flags[8]; } Allocation;
typedef struct { Location location; int flags; } Access;

typedef int (*Create)(uint64_t *, size_t, const Allocation *, unsigned long long);
typedef int (*Reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
typedef int (*Map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
typedef int (*SetAccess)(uint64_t, size_t, const Access *, size_t);
typedef int (*Free)(uint64_t, size_t);
typedef int (*Release)(uint64_t);

static void *driver(const char *name) {
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? dlsym(library, name) : 0;
}

/* What was launched may still use it: like cudaFree, wait for that. While a graph is captured one cannot; then it is kept. */
void give(void *memory, ssize_t nbytes, int device, void *stream) {
    (void)device, (void)stream;
    if (((int (*)(void))driver("cuCtxSynchronize"))()) return;
    ((Free)driver("cuMemUnmap"))((uint64_t)memory, nbytes);
    ((Free)driver("cuMemAddressFree"))((uint64_t)memory, nbytes);
}

/* 0 if there is none. It lives until the last process that maps it does so no more. */
void *take(ssize_t nbytes, int device, void *stream) {
    Allocation kind = {PINNED, BY_FD, {ON_DEVICE, device}, 0, {0}};
    Access access = {{ON_DEVICE, device}, READ_WRITE};
    uint64_t handle = 0, address = 0;
    (void)stream;
    if (!driver("cuMemCreate") || ((Create)driver("cuMemCreate"))(&handle, nbytes, &kind, 0)) return 0;
    if (((Reserve)driver("cuMemAddressReserve"))(&address, nbytes, 0, 0, 0)) address = 0;
    if (address && ((Map)driver("cuMemMap"))(address, nbytes, 0, handle, 0)) {
        ((Free)driver("cuMemAddressFree"))(address, nbytes);
        address = 0;
    }
    ((Release)driver("cuMemRelease"))(handle);
    if (address && ((SetAccess)driver("cuMemSetAccess"))(address, nbytes, &access, 1)) {
        give((void *)address, nbytes, device, 0);
        address = 0;
    }
    return (void *)address;
}
