/* A fake libnvidia-ml.so.1. The file in $FAKE_NVML, read at each call, has lines "GPU NAME VALUE":
   "- count 2" for the machine, "0 use 87" for a GPU. OLD leaves out functions of newer drivers. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GPUS 16
#define TIMEOUT 10
#define NOT_SUPPORTED 3
#define LOST 15

static char cells[GPUS]; /* a handle is the address of a cell */
static long delivered[GPUS];

static long value(const char *gpu, const char *name, long otherwise) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char who[32], what[32];
    long number, found = otherwise;
    if (file == NULL) return otherwise;
    while (fscanf(file, "%31s %31s %ld", who, what, &number) == 3)
        if (!strcmp(who, gpu) && !strcmp(what, name)) found = number;
    fclose(file);
    return found;
}

static long of(void *device, const char *name) {
    char gpu[8];
    snprintf(gpu, sizeof gpu, "%d", (int)((char *)device - cells));
    return value(gpu, name, -1);
}

/* Return 0 and the number, or the code of an error. */
static int get(void *device, const char *name, long *number) {
    if (of(device, "hang") > 0) pause();
    if (of(device, "lost") > 0) return LOST;
    *number = of(device, name);
    return *number < 0 ? NOT_SUPPORTED : 0;
}

int nvmlInit_v2(void) { return (int)value("-", "init", 0); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)value("-", "count", 0);
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &cells[index];
    return of(*device, "lost") > 1 ? LOST : 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    int index = GPUS - 1; /* a MIG device */
    if (strncmp(uuid, "MIG-", 4) && sscanf(uuid, "GPU-%d-fake", &index) != 1) return 6;
    *device = &cells[index];
    return 0;
}

int nvmlDeviceGetIndex(void *device, unsigned *index) {
    *index = (unsigned)((char *)device - cells);
    return *index == GPUS - 1 ? NOT_SUPPORTED : 0;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    snprintf(text, length, "GPU-%04d-fake", (int)((char *)device - cells));
    return 0;
}

int nvmlDeviceGetName(void *device, char *text, unsigned length) {
    (void)device;
    snprintf(text, length, "Fake H100");
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    long number;
    int code = get(device, "use", &number);
    rates[0] = (unsigned)number;
    rates[1] = 1;
    return code;
}

static int one(void *device, const char *name, unsigned *number) {
    long found;
    int code = get(device, name, &found);
    *number = (unsigned)found;
    return code;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { return one(device, "power", milliwatts); }

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *degrees) {
    return sensor ? 2 : one(device, "temperature", degrees);
}

int nvmlDeviceGetClockInfo(void *device, int clock, unsigned *megahertz) {
    return one(device, clock == 1 ? "sm" : clock == 2 ? "mem" : "none", megahertz);
}

#ifndef OLD

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory) {
    long used, total;
    int code;
    if (memory->version != (sizeof *memory | 2 << 24)) return 25;
    code = get(device, "memory", &used);
    if (code == 0) code = get(device, "total", &total);
    if (code) return code;
    memory->total = (unsigned long long)total;
    memory->reserved = 1 << 20;
    memory->used = (unsigned long long)used - memory->reserved;
    memory->free = memory->total - (unsigned long long)used;
    return 0;
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count) {
    long number;
    int code = kind == 1 && counter == 0 ? get(device, "ecc", &number) : 2;
    *count = (unsigned long long)number;
    return code;
}

struct event {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

int nvmlEventSetCreate(void **set) {
    *set = cells;
    return 0;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
    return types == 8 && set == cells && of(device, "xid") >= 0 ? 0 : NOT_SUPPORTED;
}

int nvmlEventSetWait_v2(void *set, struct event *event, unsigned timeout) {
    int index;
    (void)set;
    (void)timeout;
    for (index = 0; index < GPUS; index++) {
        long xid = of(&cells[index], "xid");
        if (xid > 0 && xid != delivered[index]) {
            delivered[index] = xid;
            event->device = &cells[index];
            event->type = 8;
            event->data = (unsigned long long)xid;
            return 0;
        }
    }
    return TIMEOUT;
}

#endif
