/* A graphics card that is a directory: what each process holds of it is a file named by its pid, and counts as long as
   that process lives, as with the real driver. Both libraries look at it, so one sees what is done through the other. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define CARD_BYTES (16384 * MIB)

static const char *card(void) { return getenv("CARD"); }

static size_t read_number(const char *directory, const char *name) {
    char path[4096];
    size_t number = 0;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%zu", &number) != 1) number = 0;
        fclose(file);
    }
    return number;
}

static int lives(const char *pid) {
    char path[300], state = 'X';
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (fscanf(file, "%*d %*[^)]) %c", &state) != 1) state = 'X';
    fclose(file);
    return state != 'Z' && state != 'X';
}

/* The file `others` is what somebody else holds for ever. */
static size_t used_bytes(void) {
    size_t used = read_number(card(), "others");
    DIR *directory = opendir(card());
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (atoi(entry->d_name) > 0 && lives(entry->d_name)) used += read_number(card(), entry->d_name);
    if (directory) closedir(directory);
    return used;
}
