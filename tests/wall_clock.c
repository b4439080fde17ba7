/* Preloaded into processes: their clock on the wall, and what waits until an hour of it, is off by what a shared file
 * says, which may change at any time. Monotonic clocks and the times of files are the machine's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define SLICE (SECOND / 5) /* after so long a wait looks at the clock again */
#define WALL_S 1000000000L /* no machine has been up for so long: a later time is one of the wall's */

static int64_t none;
static const volatile int64_t *offset = &none;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_cond)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_cond_clock)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
static int (*real_sem)(sem_t *, const struct timespec *);
static int (*real_sem_clock)(sem_t *, clockid_t, const struct timespec *);
static long (*real_syscall)(long, ...);

__attribute__((constructor)) static void start(void) {
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_cond = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* x86 has an older one, too */
    if (!real_cond) real_cond = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    real_cond_clock = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    real_sem = dlsym(RTLD_NEXT, "sem_timedwait");
    real_sem_clock = dlsym(RTLD_NEXT, "sem_clockwait");
    real_syscall = dlsym(RTLD_NEXT, "syscall");
    int file = open(getenv("OUTRIDER_TEST_WALL_CLOCK"), O_RDONLY);
    void *shared = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) abort();
    close(file);
    offset = shared;
}

/* Others' constructors may ask for the time before ours has run. */
static void ready(void) {
    if (!real_syscall) start();
}

static int64_t ns(const struct timespec *time) { return time->tv_sec * SECOND + time->tv_nsec; }

static struct timespec spec(int64_t ns) { return (struct timespec){ns / SECOND, ns % SECOND}; }

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

static int64_t machines(void) {
    struct timespec now;
    real_gettime(CLOCK_REALTIME, &now);
    return ns(&now);
}

/* By the machine's clock: when to look again whether `until` has come. */
static struct timespec look(const struct timespec *until) {
    int64_t now = machines(), left = ns(until) - now - *offset;
    return spec(now + (left < SLICE ? left : SLICE));
}

static int has_come(const struct timespec *until) { return machines() + *offset >= ns(until); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    ready();
    int failed = real_gettime(clock, now);
    if (!failed && is_wall(clock)) *now = spec(ns(now) + *offset);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    *now = (struct timeval){wall.tv_sec, wall.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *now) {
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    if (now) *now = wall.tv_sec;
    return wall.tv_sec;
}

/* Whoever waits for a condition may be woken for nothing, and looks itself whether its time is over. */
int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    ready();
    if (until->tv_sec < WALL_S) return real_cond(cond, mutex, until);
    struct timespec next = look(until);
    int failed = real_cond(cond, mutex, &next);
    return failed == ETIMEDOUT && !has_come(until) ? 0 : failed;
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
    ready();
    if (!is_wall(clock)) return real_cond_clock(cond, mutex, clock, until);
    struct timespec next = look(until);
    int failed = real_cond_clock(cond, mutex, clock, &next);
    return failed == ETIMEDOUT && !has_come(until) ? 0 : failed;
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
    ready();
    for (;;) {
        struct timespec next = look(until);
        int failed = real_sem(sem, &next);
        if (!failed || errno != ETIMEDOUT || has_come(until)) return failed;
    }
}

int sem_clockwait(sem_t *restrict sem, clockid_t clock, const struct timespec *restrict until) {
    ready();
    return is_wall(clock) ? sem_timedwait(sem, until) : real_sem_clock(sem, clock, until);
}

/* Abseil, in Ray and gRPC, waits by the system call itself. */
long syscall(long number, ...) {
    ready();
    long args[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) args[i] = va_arg(list, long);
    va_end(list);
    const struct timespec *until = (const struct timespec *)args[3];
    int is_wait = number == SYS_futex && (args[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET;
    if (!is_wait || !(args[1] & FUTEX_CLOCK_REALTIME) || !until)
        return real_syscall(number, args[0], args[1], args[2], args[3], args[4], args[5]);
    struct timespec next = look(until);
    long failed = real_syscall(number, args[0], args[1], args[2], &next, args[4], args[5]);
    if (failed && errno == ETIMEDOUT && !has_come(until)) errno = EINTR;
    return failed;
}
