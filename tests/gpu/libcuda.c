/* The few calls of the CUDA driver that the leak makes, on the card of card.h. A file `hang` on it makes the next
   allocation never return; a file `refuse_above` holds the bytes of a process above which it gets no more; with a file
   `sink` it grants everything and holds nothing. */
#include "card.h"

#define OUT_OF_MEMORY 2
#define NO_DEVICE 100
#define CONTEXT_BYTES (256 * MIB)

static size_t mine = 0, written = 0;

static int hold(size_t size) {
    char path[4096], draft[4096], sink[4096];
    mine += size;
    snprintf(sink, sizeof sink, "%s/sink", card());
    if (!access(sink, F_OK)) return 0;
    snprintf(path, sizeof path, "%s/%d", card(), (int)getpid());
    snprintf(draft, sizeof draft, "%s/draft.%d", card(), (int)getpid());
    FILE *file = fopen(draft, "w");
    if (!file) return NO_DEVICE;
    fprintf(file, "%zu", mine);
    fclose(file);
    return rename(draft, path) ? NO_DEVICE : 0;
}

int cuInit(unsigned flags) { return flags || !card() || access(card(), R_OK) ? NO_DEVICE : 0; }

int cuDeviceGet(int *device, int ordinal) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (ordinal || !visible || (strcmp(visible, "GPU-stub") && strcmp(visible, "0"))) return NO_DEVICE;
    *device = 0;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &mine;
    return device ? NO_DEVICE : hold(CONTEXT_BYTES);
}

int cuCtxSetCurrent(void *context) { return context == &mine ? 0 : NO_DEVICE; }

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *total = CARD_BYTES;
    *free = CARD_BYTES - used_bytes();
    return 0;
}

int cuMemAlloc_v2(unsigned long long *address, size_t size) {
    size_t most = read_number(card(), "refuse_above");
    char hang[4096];
    snprintf(hang, sizeof hang, "%s/hang", card());
    while (!access(hang, F_OK)) usleep(10000);
    if (used_bytes() + size > CARD_BYTES || (most && mine - CONTEXT_BYTES + size > most)) return OUT_OF_MEMORY;
    *address = 0x7f0000000000ULL + mine;
    return hold(size);
}

int cuMemsetD8_v2(unsigned long long address, unsigned char byte, size_t size) {
    written += address >= 0x7f0000000000ULL && byte ? size : 0;
    return 0;
}

int cuCtxSynchronize(void) { return written == mine - CONTEXT_BYTES ? 0 : NO_DEVICE; }
