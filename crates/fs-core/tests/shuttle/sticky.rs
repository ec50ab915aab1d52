//! A scheduler whose threads go on for a while.

use shuttle::scheduler::{DataSource, RandomDataSource, Schedule, Scheduler, Task, TaskId};

use crate::enumerate::random::Random;

/// At each point of a schedule another thread goes on with a probability that belongs to the
/// schedule: from 1/2 down to 1/256. So a thread may be late by a whole call of another thread, as
/// with PCT, and any number of times.
pub(crate) struct Sticky {
    left: usize,
    data: RandomDataSource,
    random: Random,
    one_in: u64,
}

impl Sticky {
    pub(crate) fn new(seed: u64, schedules: usize) -> Self {
        let data = RandomDataSource::initialize(seed);
        Self { left: schedules, data, random: Random(seed), one_in: 2 }
    }
}

impl Scheduler for Sticky {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.left = self.left.checked_sub(1)?;
        self.one_in = 2 << self.random.below(8);
        Some(Schedule::new(self.data.reinitialize()))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        let stays = !is_yielding && self.random.below(self.one_in) != 0;
        let current = current.filter(|id| stays && runnable.iter().any(|task| task.id() == *id));
        let random = || runnable[self.random.below(runnable.len() as u64) as usize].id();
        Some(current.unwrap_or_else(random))
    }

    fn next_u64(&mut self) -> u64 {
        self.data.next_u64()
    }
}
