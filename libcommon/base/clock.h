/* Clocks. Durations come from the monotonic one; wall time is only for records that people read. */
#ifndef PD_BASE_CLOCK_H
#define PD_BASE_CLOCK_H
#include <stdint.h>
int64_t pd_mono_us(void);
int64_t pd_mono_ns(void);
int64_t pd_wall_us(void);
#endif
