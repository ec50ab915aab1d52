//! The choice of the engine that can run on a volume's targets (trap T17).
//!
//! Engines `rio` and `horae` need Rio's extension and an ordering log on every target. Engines
//! `barrier` and `opimq` need drives that keep an order by themselves. If a target lacks what the
//! engine needs, the volume is used with engine `sync`, and the promise is the one of `sync`. A
//! caller that insists on an engine gets an error instead.

use riopipe_order::engine::EngineKind;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::write_order::DriveOrder;

use crate::wire::Extension;

/// A property that a target lacks and the engine needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// The target does not have Rio's extension.
    Extension,
    /// The target has the extension, but no ordering log.
    Log,
    /// A drive of the volume there does not keep this order by itself.
    Order(DriveOrder),
}

/// A drive of a volume, as the choice needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberOrder {
    /// The target that has the drive, counted from 0.
    pub target: usize,
    /// The order that the drive keeps by itself.
    pub order: DriveOrder,
}

/// A target on which the engine can't run, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lacking {
    /// The target, counted from 0, in the order given.
    pub target: usize,
    /// The property that the target lacks.
    pub what: Lack,
}

/// Why an engine can't run on a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hindrance {
    /// The engine can't run on a target.
    Target(Lacking),
    /// The volume was created for this engine, so it has no partitions in the ordering logs.
    MadeFor(EngineKind),
    /// The log on this target was given up, so the labels name none there. The target has a log now.
    LogGivenUp {
        /// The target, counted from 0.
        target: usize,
    },
}

/// The engine that will run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice<Reason> {
    /// The engine.
    pub engine: EngineKind,
    /// The reason why the engine is `sync` instead of the one that is preferred; `None` if it is the requested engine.
    /// The caller must report the reason to the user of the volume.
    pub fallback: Option<Reason>,
}

/// Chooses the engine for a new volume. `required` is the engine on which the caller insists.
/// `extensions` has for each target the record of the extension in Identify Controller, `drives` the
/// drives of the volume.
///
/// # Errors
/// The caller insists on an engine that can't run.
pub fn choose_for_new(
    required: Option<EngineKind>,
    extensions: impl IntoIterator<Item = Option<Extension>>,
    drives: &[MemberOrder],
) -> Result<Choice<Lacking>, Lacking> {
    choose_or_fall_back(EngineKind::PREFERRED, required, |engine| {
        let keeps_log = engine.capabilities().keeps_log;
        let lacking = if keeps_log { first_lacking(extensions) } else { None };
        lacking.or_else(|| first_without_order(engine, drives))
    })
}

/// Chooses the engine for a volume that was created for the engine `made_for`. `logged` has for each
/// target whether the volume has, or gets, partitions in the log there. The other parameters are
/// those of [`choose_for_new`].
///
/// # Errors
/// The caller insists on an engine that can't run.
pub fn choose(
    made_for: EngineKind,
    required: Option<EngineKind>,
    extensions: impl IntoIterator<Item = Option<Extension>>,
    logged: impl IntoIterator<Item = bool>,
    drives: &[MemberOrder],
) -> Result<Choice<Hindrance>, Hindrance> {
    choose_or_fall_back(made_for, required, |engine| {
        if !engine.capabilities().keeps_log {
            return first_without_order(engine, drives).map(Hindrance::Target);
        }
        if let Some(lacking) = first_lacking(extensions) {
            return Some(Hindrance::Target(lacking));
        }
        if !made_for.capabilities().keeps_log {
            return Some(Hindrance::MadeFor(made_for));
        }
        let target = logged.into_iter().position(|logged| !logged)?;
        Some(Hindrance::LogGivenUp { target })
    })
}

/// The first target with a drive that does not keep the order that the engine needs.
fn first_without_order(engine: EngineKind, drives: &[MemberOrder]) -> Option<Lacking> {
    let needed = engine.capabilities().drive_order;
    let lacks = |drive: &&MemberOrder| needed != DriveOrder::None && drive.order != needed;
    let drive = drives.iter().find(lacks)?;
    Some(Lacking { target: drive.target, what: Lack::Order(needed) })
}

/// The first target on which an engine with logs can't run; `None` if it can run on all.
fn first_lacking(extensions: impl IntoIterator<Item = Option<Extension>>) -> Option<Lacking> {
    extensions.into_iter().enumerate().find_map(|(target, extension)| match extension {
        None => Some(Lacking { target, what: Lack::Extension }),
        Some(extension) if extension.log_kind.is_none() => {
            Some(Lacking { target, what: Lack::Log })
        }
        Some(_) => None,
    })
}

/// Chooses the engine on which the caller insists, or else the `preferred` one. If
/// `find_hindrance` returns a reason why that engine can't run, chooses `sync` instead.
///
/// # Errors
/// The reason, if the caller insists on the engine that can't run.
fn choose_or_fall_back<Reason>(
    preferred: EngineKind,
    required: Option<EngineKind>,
    find_hindrance: impl FnOnce(EngineKind) -> Option<Reason>,
) -> Result<Choice<Reason>, Reason> {
    let engine = required.unwrap_or(preferred);
    if probe::is_bug_planted(Plant::T17NoFallback) {
        return Ok(Choice { engine, fallback: None });
    }
    let Some(hindrance) = find_hindrance(engine) else {
        return Ok(Choice { engine, fallback: None });
    };
    if required.is_some() {
        return Err(hindrance);
    }
    probe::count_rare(Rare::FellBack);
    let engine = if probe::is_bug_planted(Plant::T17FallbackUnordered) {
        EngineKind::None
    } else {
        EngineKind::FALLBACK
    };
    Ok(Choice { engine, fallback: Some(hindrance) })
}

#[cfg(test)]
mod tests {
    use riopipe_order::log_region::LogKind;

    use super::*;
    use crate::wire::EXTENSION_VERSION;

    const RIO: EngineKind = EngineKind::Rio;

    fn extension(log_kind: Option<LogKind>) -> Option<Extension> {
        let (version, region, boot) = (EXTENSION_VERSION, [1; 16], [2; 16]);
        Some(Extension { version, log_kind, log_in_memory: false, incarnation: 1, region, boot })
    }

    #[test]
    fn t17_one_foreign_target_makes_the_volume_fall_back_to_sync() {
        let (log, none) = (extension(Some(LogKind::Dax)), extension(None));
        let whole = Choice { engine: RIO, fallback: None };
        assert_eq!(choose(RIO, None, [log, log], [true; 2], &[]), Ok(whole));
        let cases = [
            ([log, None], Lacking { target: 1, what: Lack::Extension }),
            ([none, None], Lacking { target: 0, what: Lack::Log }),
        ];
        for (targets, lacking) in cases {
            let hindrance = Hindrance::Target(lacking);
            let back = Choice { engine: EngineKind::Sync, fallback: Some(hindrance) };
            assert_eq!(choose(RIO, None, targets, [true; 2], &[]), Ok(back));
            let insists = choose(RIO, Some(RIO), targets, [true; 2], &[]);
            assert_eq!(insists, Err(hindrance), "never without a report");
            let back = Choice { engine: EngineKind::Sync, fallback: Some(lacking) };
            assert_eq!(choose_for_new(None, targets, &[]), Ok(back));
            assert_eq!(choose_for_new(Some(RIO), targets, &[]), Err(lacking));
        }
        assert_eq!(choose_for_new(None, [log], &[]), Ok(Choice { engine: RIO, fallback: None }));
    }

    #[test]
    fn t17_an_engine_without_a_log_runs_anywhere() {
        let log = extension(Some(LogKind::Block));
        for engine in [EngineKind::Sync, EngineKind::None] {
            let whole = Ok(Choice { engine, fallback: None });
            assert_eq!(choose(engine, None, [None], [false], &[]), whole);
            assert_eq!(choose(RIO, Some(engine), [None], [true], &[]), whole);
            assert_eq!(choose_for_new(Some(engine), [None], &[]).map(|c| c.engine), Ok(engine));
            let hindrance = Hindrance::MadeFor(engine);
            assert_eq!(choose(engine, Some(RIO), [log], [false], &[]), Err(hindrance));
        }
    }

    #[test]
    fn t19_a_log_that_was_given_up_is_not_used_before_the_labels_name_it() {
        let log = extension(Some(LogKind::Block));
        let hindrance = Hindrance::LogGivenUp { target: 1 };
        let back = Choice { engine: EngineKind::Sync, fallback: Some(hindrance) };
        assert_eq!(choose(RIO, None, [log, log], [true, false], &[]), Ok(back));
        assert_eq!(choose(RIO, Some(RIO), [log, log], [true, false], &[]), Err(hindrance));
        // A target without a log is the first thing to change.
        let lacking = Hindrance::Target(Lacking { target: 0, what: Lack::Log });
        let without = [extension(None), log];
        assert_eq!(choose(RIO, Some(RIO), without, [false, false], &[]), Err(lacking));
    }
}
