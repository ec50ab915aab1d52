//! The points of a comparison: one base point, and from it one axis at a time.

use std::fmt;

use crate::{
    access::Access,
    report::Point,
    workload::{BLOCK, Pattern, Shape, Workload},
};

/// The parameter that varies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Number of writes in flight.
    Depth,
    /// Number of writing threads: the paper's Figure 10.
    Threads,
    /// Bytes per write: the paper's Figure 11.
    Size,
    /// Number of adjacent writes of a batch: the paper's Figure 12.
    Batch,
}

impl Axis {
    /// All axes, in the order of their points.
    pub const ALL: [Self; 4] = [Self::Depth, Self::Threads, Self::Size, Self::Batch];

    /// The name in lower case, for file names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Depth => "depth",
            Self::Threads => "threads",
            Self::Size => "size",
            Self::Batch => "batch",
        }
    }

    /// The title for display.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Depth => "queue depth",
            Self::Threads => "threads",
            Self::Size => "KiB per write",
            Self::Batch => "writes per batch",
        }
    }

    /// The values of the full sweep.
    #[must_use]
    pub fn values(self) -> &'static [u32] {
        match self {
            Self::Depth => &[1, 2, 4, 8, 16, 32, 64, 128],
            Self::Threads => &[1, 2, 4, 8, 12],
            Self::Size => &[4096, 8192, 16_384, 32_768, 65_536],
            Self::Batch => &[1, 2, 4, 8, 16],
        }
    }

    /// The value of a point on this axis.
    #[must_use]
    pub fn of(self, point: &Point) -> u32 {
        match self {
            Self::Depth => point.queue_depth,
            Self::Threads => point.threads,
            Self::Size => point.size,
            Self::Batch => point.batch,
        }
    }

    /// The value of this axis while another one varies.
    fn base(self) -> u32 {
        match self {
            Self::Depth => 32,
            Self::Threads | Self::Batch => 1,
            Self::Size => BLOCK,
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title())
    }
}

/// The values on each axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// In the order of [`Axis::ALL`]; none is empty.
    values: [Vec<u32>; 4],
}

impl Sweep {
    /// A sweep from lists of values, in the order of [`Axis::ALL`]; `None`: not given. A list of
    /// one value holds for all points, a longer one is an axis. If nothing is given, every axis has
    /// all of its values; otherwise a parameter that isn't given has its usual value.
    #[must_use]
    pub fn new(lists: [Option<Vec<u32>>; 4]) -> Self {
        let all = lists.iter().all(Option::is_none);
        let mut lists = lists.into_iter();
        let values = Axis::ALL.map(|axis| {
            let mut values = match lists.next().flatten().filter(|list| !list.is_empty()) {
                Some(list) => list,
                None if all => axis.values().to_vec(),
                None => vec![axis.base()],
            };
            values.sort_unstable();
            values.dedup();
            values
        });
        Self { values }
    }

    /// The axes with more than one value.
    pub fn axes(&self) -> impl Iterator<Item = Axis> {
        Axis::ALL.into_iter().zip(&self.values).filter(|(_, v)| v.len() > 1).map(|(axis, _)| axis)
    }

    /// The value of `axis` while another one varies: its usual value if that was requested, else
    /// the smallest.
    #[must_use]
    pub fn base(&self, axis: Axis) -> u32 {
        let values = &self.values[axis as usize];
        if values.contains(&axis.base()) { axis.base() } else { values[0] }
    }

    /// The workloads, each once: random places, and each write a group of its own.
    #[must_use]
    pub fn workloads(&self, seed: u64) -> Vec<Workload> {
        let base = Axis::ALL.map(|axis| self.base(axis));
        let mut points = Vec::new();
        for axis in self.axes() {
            for value in &self.values[axis as usize] {
                let mut point = base;
                point[axis as usize] = *value;
                if !points.contains(&point) {
                    points.push(point);
                }
            }
        }
        if points.is_empty() {
            points.push(base);
        }
        let workload = |[queue_depth, threads, size, batch]: [u32; 4]| Workload {
            access: Access::Write,
            shape: Shape::Uniform { pattern: Pattern::Random, size, batch, group: 1 },
            queue_depth,
            threads,
            seed,
        };
        points.into_iter().map(workload).collect()
    }

    /// Those of `points` that are on `axis`, in its order.
    #[must_use]
    pub fn along<'a>(&self, axis: Axis, points: &'a [Point]) -> Vec<&'a Point> {
        let on = |point: &&Point| {
            Axis::ALL.into_iter().filter(|a| *a != axis).all(|a| a.of(point) == self.base(a))
        };
        let mut points: Vec<&Point> = points.iter().filter(on).collect();
        points.sort_by_key(|point| axis.of(point));
        points
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{report::tests::rounds, workload::WorkloadError};

    fn points(sweep: &Sweep) -> Vec<Point> {
        sweep.workloads(1).iter().map(|w| Point::new(w, 2, &rounds(), &[])).collect()
    }

    #[test]
    fn the_default_is_all_axes_of_the_paper() -> Result<(), WorkloadError> {
        let sweep = Sweep::new([const { None }; 4]);
        assert_eq!(sweep.axes().collect::<Vec<_>>(), Axis::ALL);
        let workloads = sweep.workloads(7);
        // The base point is on all four axes.
        assert_eq!(workloads.len(), 8 + 5 + 5 + 5 - 3);
        for workload in &workloads {
            workload.check()?;
            assert_eq!(workload.seed, 7);
        }
        let points = points(&sweep);
        for (axis, count) in [(Axis::Depth, 8), (Axis::Threads, 5), (Axis::Batch, 5)] {
            let values: Vec<_> =
                sweep.along(axis, &points).iter().map(|point| axis.of(point)).collect();
            assert_eq!(values, axis.values());
            assert_eq!(values.len(), count);
        }
        Ok(())
    }

    #[test]
    fn one_value_holds_for_all_points_and_several_are_an_axis() {
        let sweep = Sweep::new([Some(vec![128, 1, 32, 32]), None, Some(vec![8192]), None]);
        assert_eq!(sweep.axes().collect::<Vec<_>>(), [Axis::Depth]);
        let texts: Vec<_> = sweep.workloads(1).iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [1, 32, 128].map(|depth| format!("rand 8 KiB, queue depth {depth}, 1 thread"))
        );
        assert_eq!(sweep.along(Axis::Depth, &points(&sweep)).len(), 3);
        let one = Sweep::new([Some(vec![4]), None, None, None]);
        assert_eq!((one.axes().count(), one.workloads(1).len()), (0, 1));
        // Without the usual value, the smallest is the base.
        let sweep = Sweep::new([Some(vec![64, 2]), Some(vec![1, 2]), None, None]);
        assert_eq!(sweep.base(Axis::Depth), 2);
        assert_eq!(sweep.workloads(1).len(), 3);
    }
}
