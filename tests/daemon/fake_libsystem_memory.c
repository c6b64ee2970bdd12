/* What DarwinProbe needs of macOS's libSystem, with readings that a test recognises. Offsets are written out in bytes:
   they come from the system's headers, not from the structures under test. */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <stdlib.h>

int proc_pid_rusage(int pid, int flavour, void *buffer) {
    if (getenv("FAKE_ONLY_V0") && flavour != 0) { errno = EINVAL; return -1; }
    if (getenv("FAKE_EPERM")) { errno = EPERM; return -1; }
    uint64_t footprint = 5000000001ULL, most = 7000000002ULL, resident = 1ULL;
    memcpy((char *)buffer + 64, &resident, 8);
    memcpy((char *)buffer + 72, &footprint, 8);
    if (flavour >= 4) memcpy((char *)buffer + 240, &most, 8);
    return pid > 0 ? 0 : -1;
}

int sysctlbyname(const char *name, void *value, size_t *size, void *new_value, size_t new_size) {
    (void)new_value; (void)new_size;
    if (!strcmp(name, "hw.memsize") && *size == 8) { *(uint64_t *)value = 137438953472ULL; return 0; }
    if (!strcmp(name, "hw.pagesize") && *size == 8) { *(uint64_t *)value = 16384; return 0; }
    if (!strcmp(name, "kern.memorystatus_vm_pressure_level") && *size == 4) { *(int32_t *)value = 2; return 0; }
    if (!strcmp(name, "iogpu.wired_limit_mb") && *size == 4 && !getenv("FAKE_NO_GPU")) { *(int32_t *)value = 98304; return 0; }
    errno = ENOENT;
    return -1;
}

unsigned mach_host_self(void) { return 77; }

int host_statistics64(unsigned host, int flavour, void *buffer, unsigned *count) {
    if (host != 77 || flavour != 4 || *count != 38) return 4;
    uint32_t free_pages = 1000, purgeable = 200, external = 30;
    memcpy((char *)buffer + 0, &free_pages, 4);
    memcpy((char *)buffer + 88, &purgeable, 4);
    memcpy((char *)buffer + 136, &external, 4);
    return 0;
}
