/* Interpose on the calls that change files below a directory: log them, and make one of them die, fail or fall short.
 *
 * TORTURE_ROOT   the directory
 * TORTURE_LOG    a file to which every call is appended: "operation TAB ordinal TAB path"
 * TORTURE_PLAN   "action TAB error number TAB operation TAB ordinal TAB path": what to do at which call
 *
 * A call is named by its operation, its path below the directory, and how many calls of that operation on that path
 * came before it, so that threads in another order do not change its name. Random parts of a path (eight hexadecimal
 * digits or more) are written as "#". Actions: "kill" ends the process before the call, "killed" after it, "error" fails
 * it, "errors" fails it and each later call that can fail so, "short" writes half of what was asked.
 *
 * TORTURE_CLOCK  seconds by which the clock of the day is off, or a file that holds them and may change: see the end
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define KINDS 4096
#define NAME (PATH_MAX + 64)
#define CLOCK_BYTES 24

enum { PASS, FAIL, SHORT, DIE_AFTER };

static char root[PATH_MAX], plan_operation[32], plan_path[PATH_MAX], plan_action[16];
static size_t root_length;
static int log_descriptor = -1, plan_error, failing;
static long plan_ordinal = -1;
static struct { char *name; long count; } counted[KINDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void read_clock(void);

static void *real(const char *name) {
    void *function = dlsym(RTLD_NEXT, name);
    if (!function) abort();
    return function;
}

/* Read the variables again; a forked process calls this after it has set its own. */
void torture_read_environment(void) {
    const char *value = getenv("TORTURE_ROOT"), *plan = getenv("TORTURE_PLAN"), *log = getenv("TORTURE_LOG");
    read_clock();
    root_length = 0, plan_ordinal = -1, failing = 0;
    for (int i = 0; i < KINDS && counted[i].name; i++) free(counted[i].name), counted[i].name = NULL;
    if (log_descriptor >= 0) syscall(SYS_close, log_descriptor), log_descriptor = -1;
    if (!value || !realpath(value, root)) return;
    if (log) {
        int opened = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        log_descriptor = opened < 0 ? -1 : fcntl(opened, F_DUPFD_CLOEXEC, 700);
        if (opened >= 0) syscall(SYS_close, opened);
    }
    if (plan)
        sscanf(plan, "%15[^\t]\t%d\t%31[^\t]\t%ld\t%4095[^\n]", plan_action, &plan_error, plan_operation,
               &plan_ordinal, plan_path);
    root_length = strlen(root);
}

__attribute__((constructor)) static void start(void) { torture_read_environment(); }

/* Write the path below the directory without its random parts; return 0 for a path elsewhere. */
static int name_below(const char *path, char *out) {
    if (strncmp(path, root, root_length) || (path[root_length] != '/' && path[root_length])) return 0;
    const char *from = path + root_length + (path[root_length] == '/');
    if (!*from) from = ".";
    while (*from) {
        size_t run = strspn(from, "0123456789abcdef");
        if (run >= 8) *out++ = '#', from += run;
        else if (run) { memcpy(out, from, run); out += run, from += run; }
        else *out++ = *from++;
    }
    *out = 0;
    return 1;
}

static long ordinal_of(const char *operation, const char *path) {
    char name[NAME];
    snprintf(name, sizeof name, "%s %s", operation, path);
    for (int i = 0; i < KINDS; i++) {
        if (!counted[i].name) counted[i].name = strdup(name), counted[i].count = 0;
        if (!strcmp(counted[i].name, name)) return counted[i].count++;
    }
    return -2;
}

static int writes(const char *operation) {
    return !strcmp(operation, "write") || !strcmp(operation, "create") || !strcmp(operation, "mkdir") ||
           !strcmp(operation, "fsync") || !strcmp(operation, "link");
}

/* Decide what becomes of a call on a path: PASS; FAIL, with errno set; SHORT; or DIE_AFTER. */
static int decide(const char *operation, const char *path) {
    char below[PATH_MAX], line[NAME + 64];
    if (!root_length || !path || !name_below(path, below)) return PASS;
    int before = errno, decision = PASS;
    pthread_mutex_lock(&lock);
    long ordinal = ordinal_of(operation, below);
    if (log_descriptor >= 0) {
        int length = snprintf(line, sizeof line, "%s\t%ld\t%s\n", operation, ordinal, below);
        syscall(SYS_write, log_descriptor, line, length);
    }
    int here = ordinal == plan_ordinal && !strcmp(operation, plan_operation) && !strcmp(below, plan_path);
    if (here && !strcmp(plan_action, "kill")) syscall(SYS_kill, getpid(), SIGKILL);
    if (here && !strcmp(plan_action, "killed")) decision = DIE_AFTER;
    if (here && !strcmp(plan_action, "short")) decision = SHORT;
    if (here && !strncmp(plan_action, "error", 5)) decision = FAIL, failing = !strcmp(plan_action, "errors");
    if (failing && writes(operation)) decision = FAIL;
    pthread_mutex_unlock(&lock);
    errno = decision == FAIL ? plan_error : before;
    return decision;
}

static int decide_descriptor(const char *operation, int descriptor) {
    char link[64], path[PATH_MAX];
    if (!root_length) return PASS;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    errno = before;
    if (length <= 0) return PASS;
    path[length] = 0;
    return decide(operation, path);
}

/* Make a path absolute as the call would see it, without following its last part. */
static const char *absolute(int directory, const char *path, char *out) {
    char base[PATH_MAX] = "", link[64];
    if (!root_length || !path) return NULL;
    int before = errno;
    if (path[0] != '/') {
        snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
        long length = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
        if (length <= 0) return errno = before, NULL;
        base[length] = 0;
    }
    errno = before;
    int size = snprintf(out, PATH_MAX, "%s%s%s", base, base[0] ? "/" : "", path);
    return size < PATH_MAX ? out : NULL;
}

static void die(void) { syscall(SYS_kill, getpid(), SIGKILL); }

#define GUARD(decision, call)                                                                                         \
    do {                                                                                                              \
        int decided = (decision);                                                                                     \
        if (decided == FAIL) return -1;                                                                               \
        __typeof__(call) result = (call);                                                                             \
        if (decided == DIE_AFTER) die();                                                                              \
        return result;                                                                                                \
    } while (0)

#define OPEN(name)                                                                                                    \
    int name(const char *path, int flags, ...) {                                                                      \
        static int (*next)(const char *, int, ...);                                                                   \
        char full[PATH_MAX];                                                                                          \
        va_list arguments;                                                                                            \
        va_start(arguments, flags);                                                                                   \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;                                \
        va_end(arguments);                                                                                            \
        if (!next) next = real(#name);                                                                                \
        if (!(flags & (O_CREAT | O_TRUNC))) return next(path, flags, mode);                                           \
        GUARD(decide("create", absolute(AT_FDCWD, path, full)), next(path, flags, mode));                             \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                  \
    int name(int directory, const char *path, int flags, ...) {                                                       \
        static int (*next)(int, const char *, int, ...);                                                              \
        char full[PATH_MAX];                                                                                          \
        va_list arguments;                                                                                            \
        va_start(arguments, flags);                                                                                   \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;                                \
        va_end(arguments);                                                                                            \
        if (!next) next = real(#name);                                                                                \
        if (!(flags & (O_CREAT | O_TRUNC))) return next(directory, path, flags, mode);                                \
        GUARD(decide("create", absolute(directory, path, full)), next(directory, path, flags, mode));                 \
    }
OPENAT(openat)
OPENAT(openat64)

#define WRITE(name, parameters, full_call, short_call)                                                                \
    ssize_t name parameters {                                                                                         \
        static ssize_t(*next) parameters;                                                                             \
        if (!next) next = real(#name);                                                                                \
        int decided = decide_descriptor("write", descriptor);                                                         \
        if (decided == FAIL) return -1;                                                                               \
        if (decided == SHORT) return short_call;                                                                      \
        ssize_t result = full_call;                                                                                   \
        if (decided == DIE_AFTER) die();                                                                              \
        return result;                                                                                                \
    }
#define HALF(size) ((size) > 1 ? (size) / 2 : (size))
WRITE(write, (int descriptor, const void *bytes, size_t size), next(descriptor, bytes, size),
      next(descriptor, bytes, HALF(size)))
WRITE(pwrite, (int descriptor, const void *bytes, size_t size, off_t at), next(descriptor, bytes, size, at),
      next(descriptor, bytes, HALF(size), at))
WRITE(pwrite64, (int descriptor, const void *bytes, size_t size, off64_t at), next(descriptor, bytes, size, at),
      next(descriptor, bytes, HALF(size), at))
WRITE(writev, (int descriptor, const struct iovec *parts, int count), next(descriptor, parts, count),
      write(descriptor, parts->iov_base, HALF(parts->iov_len)))
WRITE(pwritev, (int descriptor, const struct iovec *parts, int count, off_t at), next(descriptor, parts, count, at),
      pwrite(descriptor, parts->iov_base, HALF(parts->iov_len), at))
WRITE(sendfile, (int descriptor, int from, off_t *at, size_t size), next(descriptor, from, at, size),
      next(descriptor, from, at, HALF(size)))

ssize_t copy_file_range(int from, off64_t *at, int descriptor, off64_t *to, size_t size, unsigned int flags) {
    static ssize_t (*next)(int, off64_t *, int, off64_t *, size_t, unsigned int);
    if (!next) next = real("copy_file_range");
    int decided = decide_descriptor("write", descriptor);
    if (decided == FAIL) return -1;
    ssize_t result = next(from, at, descriptor, to, decided == SHORT ? HALF(size) : size, flags);
    if (decided == DIE_AFTER) die();
    return result;
}

#define ON_DESCRIPTOR(name, operation, parameters, ...)                                                               \
    int name parameters {                                                                                             \
        static int(*next) parameters;                                                                                 \
        if (!next) next = real(#name);                                                                                \
        GUARD(decide_descriptor(operation, descriptor), next(__VA_ARGS__));                                           \
    }
ON_DESCRIPTOR(fsync, "fsync", (int descriptor), descriptor)
ON_DESCRIPTOR(fdatasync, "fsync", (int descriptor), descriptor)
ON_DESCRIPTOR(ftruncate, "truncate", (int descriptor, off_t size), descriptor, size)
ON_DESCRIPTOR(ftruncate64, "truncate", (int descriptor, off64_t size), descriptor, size)

#define ON_PATH(name, operation, parameters, directory, path, ...)                                                    \
    int name parameters {                                                                                             \
        static int(*next) parameters;                                                                                 \
        char full[PATH_MAX];                                                                                          \
        if (!next) next = real(#name);                                                                                \
        GUARD(decide(operation, absolute(directory, path, full)), next(__VA_ARGS__));                                 \
    }
/* Renames and links are named by what they make. */
ON_PATH(rename, "rename", (const char *old, const char *new), AT_FDCWD, new, old, new)
ON_PATH(renameat, "rename", (int from, const char *old, int to, const char *new), to, new, from, old, to, new)
ON_PATH(renameat2, "rename", (int from, const char *old, int to, const char *new, unsigned int flags), to, new, from,
        old, to, new, flags)
ON_PATH(link, "link", (const char *old, const char *new), AT_FDCWD, new, old, new)
ON_PATH(linkat, "link", (int from, const char *old, int to, const char *new, int flags), to, new, from, old, to, new,
        flags)
ON_PATH(symlink, "link", (const char *old, const char *new), AT_FDCWD, new, old, new)
ON_PATH(symlinkat, "link", (const char *old, int to, const char *new), to, new, old, to, new)
ON_PATH(unlink, "unlink", (const char *path), AT_FDCWD, path, path)
ON_PATH(unlinkat, "unlink", (int directory, const char *path, int flags), directory, path, directory, path, flags)
ON_PATH(rmdir, "unlink", (const char *path), AT_FDCWD, path, path)
ON_PATH(mkdir, "mkdir", (const char *path, mode_t mode), AT_FDCWD, path, path, mode)
ON_PATH(mkdirat, "mkdir", (int directory, const char *path, mode_t mode), directory, path, directory, path, mode)
ON_PATH(truncate, "truncate", (const char *path, off_t size), AT_FDCWD, path, path, size)

/* The clock of the day, which TORTURE_CLOCK shifts; monotonic clocks and the times of files stay as they are. A wait
 * until a time of day ends when the shifted clock shows it, as it does when somebody sets the clock. */

static const volatile char *clock_file;
static long clock_seconds;

static void read_clock(void) {
    const char *value = getenv("TORTURE_CLOCK");
    if (clock_file) munmap((void *)clock_file, CLOCK_BYTES), clock_file = NULL;
    clock_seconds = 0;
    if (!value) return;
    if (*value != '/') {
        clock_seconds = strtol(value, NULL, 10);
        return;
    }
    int opened = syscall(SYS_openat, AT_FDCWD, value, O_RDONLY | O_CLOEXEC);
    void *mapped = mmap(NULL, CLOCK_BYTES, PROT_READ, MAP_SHARED, opened, 0);
    if (opened >= 0) syscall(SYS_close, opened);
    if (mapped != MAP_FAILED) clock_file = mapped;
}

static long shift(void) {
    char text[CLOCK_BYTES + 1] = "";
    if (!clock_file) return clock_seconds;
    for (int i = 0; i < CLOCK_BYTES; i++) text[i] = clock_file[i];
    return strtol(text, NULL, 10);
}

static int is_of_day(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = real("clock_gettime");
    int result = next(clock, now);
    if (!result && is_of_day(clock)) now->tv_sec += shift();
    return result;
}

int timespec_get(struct timespec *now, int base) {
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, now) ? base : 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

/* The kernel waits by its own clock. */
static struct timespec by_kernel(const struct timespec *until) {
    struct timespec result = *until;
    result.tv_sec -= shift();
    if (result.tv_sec < 0) result.tv_sec = 0;
    return result;
}

#define WAIT(name, type)                                                                                              \
    int name(type *on, const struct timespec *restrict until) {                                                       \
        static int (*next)(type *, const struct timespec *);                                                          \
        if (!next) next = real(#name);                                                                                \
        struct timespec shifted = by_kernel(until);                                                                   \
        return next(on, &shifted);                                                                                    \
    }
WAIT(sem_timedwait, sem_t)
WAIT(pthread_mutex_timedlock, pthread_mutex_t)

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!next) next = real("pthread_cond_clockwait");
    struct timespec shifted = by_kernel(until);
    return next(condition, mutex, clock, is_of_day(clock) ? &shifted : until);
}

/* Programs that wait without the C library call the kernel by `syscall`. */
long syscall(long number, ...) {
    static long (*next)(long, ...);
    if (!next) next = real("syscall");
    va_list arguments;
    long a[6];
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    struct timespec shifted;
    int until_day = FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME;
    if (number == SYS_futex && (a[1] & ~FUTEX_PRIVATE_FLAG) == until_day && a[3]) {
        shifted = by_kernel((const struct timespec *)a[3]);
        a[3] = (long)&shifted;
    }
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* A condition may have been given the monotonic clock, which only it knows: what is far from the clock of the day is
 * not of it. */
int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next) next = real("pthread_cond_timedwait");
    struct timespec shifted = by_kernel(until), monotonic;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &monotonic);
    int of_day = labs(until->tv_sec - monotonic.tv_sec) > (1L << 26) || !shift();
    return next(condition, mutex, of_day ? &shifted : until);
}
