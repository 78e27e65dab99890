/* The few calls of NVML that the harness makes, on the card of card.h. */
#include "card.h"

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilization_t;

int nvmlInitWithFlags(unsigned flags) { return !card() || flags; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error ? "the stub has no card" : "fine"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)1;
    return index != 0;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-stub");
    return device != (void *)1;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    snprintf(name, length, "Stub card");
    return device != (void *)1;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "0.stub");
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = CARD_BYTES;
    memory->used = used_bytes();
    memory->free = memory->total - memory->used;
    return device != (void *)1;
}

int nvmlDeviceGetUtilizationRates(void *device, utilization_t *rates) {
    rates->gpu = rates->memory = 0;
    return device != (void *)1;
}
