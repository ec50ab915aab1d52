//! The objects that C has pointers to. Each begins with a tag of its kind, so that a pointer to another object is
//! noticed, and has the number of calls that use it, so that two calls never use it at the same time if they may not.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::codes::{RIOP_BUSY, RIOP_HANDLE, RIOP_PANIC};
use crate::failure::Failure;
use crate::memory::null;

/// The tag of an object that was freed.
const FREED: u64 = u64::from_le_bytes(*b"riopfree");

/// The number of users while one call has the object for itself.
const EXCLUSIVE: u32 = u32::MAX;

/// A kind of object.
pub(crate) trait Kind {
    /// The first bytes of each object of this kind.
    const TAG: u64;
    /// The name in C.
    const NAME: &'static str;
}

/// Gives a type its [`Kind`].
macro_rules! kind {
    ($type:ty, $tag:literal, $name:literal) => {
        impl crate::handle::Kind for $type {
            const TAG: u64 = u64::from_le_bytes(*$tag);
            const NAME: &'static str = $name;
        }
    };
}
pub(crate) use kind;

/// An object of the library. C has only pointers to it.
#[repr(C)]
#[derive(Debug)]
pub struct Handle<T> {
    tag: AtomicU64,
    /// The calls that use the object, or [`EXCLUSIVE`].
    users: AtomicU32,
    /// A call has panicked while it could change the object.
    is_broken: AtomicBool,
    /// `None` only if a call that was to consume the value has panicked.
    value: UnsafeCell<Option<T>>,
}

/// Makes an object.
pub(crate) fn new<T: Kind>(value: T) -> *mut Handle<T> {
    Box::into_raw(Box::new(Handle {
        tag: AtomicU64::new(T::TAG),
        users: AtomicU32::new(0),
        is_broken: AtomicBool::new(false),
        value: UnsafeCell::new(Some(value)),
    }))
}

/// Takes the object for a call that other threads may make at the same time.
///
/// # Safety
/// `object` is null, or points to an object of this library that is not freed during `'a`.
pub(crate) unsafe fn shared<'a, T: Kind + Sync>(
    object: *const Handle<T>,
) -> Result<Shared<'a, T>, Failure> {
    // SAFETY: as the caller has promised.
    let handle = unsafe { checked(object) }?;
    let one_more = |users: u32| users.checked_add(1).filter(|users| *users != EXCLUSIVE);
    let entered = handle.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more);
    entered.map_err(|_| busy::<T>())?;
    // From here on, the drop leaves the object.
    let shared = Shared { handle };
    handle.check_not_broken()?;
    Ok(shared)
}

/// Takes the object for a call that no other thread may make at the same time.
///
/// # Safety
/// As [`shared`].
pub(crate) unsafe fn exclusive<'a, T: Kind + Send>(
    object: *mut Handle<T>,
) -> Result<Exclusive<'a, T>, Failure> {
    // SAFETY: as the caller has promised.
    let handle = unsafe { checked(object) }?;
    let exclusive = handle.enter_exclusively()?;
    handle.check_not_broken()?;
    Ok(exclusive)
}

/// A value that was not consumed, and the reason.
pub(crate) type NotConsumed<T> = Box<(T, Failure)>;

/// Consumes the value of an object and frees the object, if `call` succeeds. If `call` fails, it returns the value, and
/// the object is as before.
///
/// # Safety
/// As [`shared`]. After a success the object is freed.
pub(crate) unsafe fn consume<T: Kind + Send, R>(
    object: *mut Handle<T>,
    call: impl FnOnce(T) -> Result<R, NotConsumed<T>>,
) -> Result<R, Failure> {
    // SAFETY: as the caller has promised.
    let mut taken = unsafe { exclusive(object) }?;
    let value = taken.slot().take().expect("only a panic leaves an object without its value");
    match call(value) {
        Ok(result) => {
            std::mem::forget(taken);
            // SAFETY: this call has the object for itself, and never releases it.
            unsafe { discard(object) };
            Ok(result)
        }
        Err(back) => {
            let (value, failure) = *back;
            *taken.slot() = Some(value);
            Err(failure)
        }
    }
}

/// Frees an object. Does nothing for null.
///
/// # Safety
/// As [`shared`]. After a success the object is freed.
pub(crate) unsafe fn free<T: Kind + Send>(object: *mut Handle<T>) -> Result<(), Failure> {
    if object.is_null() {
        return Ok(());
    }
    // SAFETY: as the caller has promised.
    let handle = unsafe { checked(object) }?;
    // Also an object that a panic has broken can be freed.
    std::mem::forget(handle.enter_exclusively()?);
    // SAFETY: this call has the object for itself, and never releases it.
    unsafe { discard(object) };
    Ok(())
}

/// # Safety
/// `object` came from [`new`], and no other call uses it, now or later.
unsafe fn discard<T: Kind>(object: *mut Handle<T>) {
    // SAFETY: as the caller has promised.
    let object = unsafe { Box::from_raw(object) };
    // The memory keeps this as long as nothing else uses it. A later call then finds it there.
    object.tag.store(FREED, Ordering::Release);
    drop(object);
}

/// The object, if it is one of this kind.
///
/// # Safety
/// `object` is null, or points to an object of this library that is not freed during `'a`.
unsafe fn checked<'a, T: Kind>(object: *const Handle<T>) -> Result<&'a Handle<T>, Failure> {
    if object.is_null() {
        return Err(null(T::NAME));
    }
    if !object.is_aligned() {
        return Err(wrong::<T>("no object of this library"));
    }
    // SAFETY: each object of this library begins with its tag. The pointer is aligned for it.
    let tag = unsafe { &(*object).tag };
    match tag.load(Ordering::Acquire) {
        // SAFETY: the tag is that of this kind, so the object is of this kind.
        tag if tag == T::TAG => Ok(unsafe { &*object }),
        FREED => Err(wrong::<T>("freed already")),
        _ => Err(wrong::<T>("another object, or none of this library")),
    }
}

fn wrong<T: Kind>(what: &str) -> Failure {
    Failure::new(RIOP_HANDLE, format!("the pointer is to no {}: it is {what}", T::NAME))
}

fn busy<T: Kind>() -> Failure {
    Failure::retryable(
        RIOP_BUSY,
        format!(
            "another thread is in a call with this {}, which does not allow a second one",
            T::NAME
        ),
    )
}

impl<T> Handle<T> {
    fn enter_exclusively(&self) -> Result<Exclusive<'_, T>, Failure>
    where
        T: Kind,
    {
        self.users
            .compare_exchange(0, EXCLUSIVE, Ordering::Acquire, Ordering::Relaxed)
            .map_err(|_| busy::<T>())?;
        Ok(Exclusive { handle: self })
    }

    fn check_not_broken(&self) -> Result<(), Failure>
    where
        T: Kind,
    {
        if self.is_broken.load(Ordering::Relaxed) {
            return Err(Failure::new(
                RIOP_PANIC,
                format!(
                    "an earlier call with this {} failed by an error of the library: free it",
                    T::NAME
                ),
            ));
        }
        Ok(())
    }
}

/// An object that calls of several threads may use at the same time.
#[derive(Debug)]
pub(crate) struct Shared<'a, T> {
    handle: &'a Handle<T>,
}

impl<T> Deref for Shared<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: no call has the object for itself, so no code changes the value.
        let value = unsafe { &*self.handle.value.get() };
        value.as_ref().expect("only a panic leaves an object without its value")
    }
}

impl<T> Drop for Shared<'_, T> {
    fn drop(&mut self) {
        self.handle.users.fetch_sub(1, Ordering::Release);
    }
}

/// An object that one call has for itself.
#[derive(Debug)]
pub(crate) struct Exclusive<'a, T> {
    handle: &'a Handle<T>,
}

impl<T> Exclusive<'_, T> {
    fn slot(&mut self) -> &mut Option<T> {
        // SAFETY: this call has the object for itself, and this is the only reference to the value.
        unsafe { &mut *self.handle.value.get() }
    }
}

impl<T> Deref for Exclusive<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this call has the object for itself, and `self` is borrowed, so no code changes the value.
        let value = unsafe { &*self.handle.value.get() };
        value.as_ref().expect("only a panic leaves an object without its value")
    }
}

impl<T> DerefMut for Exclusive<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.slot().as_mut().expect("only a panic leaves an object without its value")
    }
}

impl<T> Drop for Exclusive<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.handle.is_broken.store(true, Ordering::Relaxed);
        }
        self.handle.users.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::ptr;
    use std::sync::Arc;

    use super::*;
    use crate::codes::RIOP_ARGUMENT;

    struct Number(u64);
    struct Shelf(Arc<()>);
    kind!(Number, b"test-num", "number");
    kind!(Shelf, b"test-shf", "shelf");

    fn code<T>(result: Result<T, Failure>) -> i32 {
        result.map_or_else(|failure| failure.code, |_| 0)
    }

    #[test]
    fn pointers_to_other_objects_are_noticed() {
        let number = new(Number(7));
        // SAFETY: the pointers are null or to objects, which are freed at the end of this test.
        unsafe {
            assert_eq!(shared(number).unwrap().0, 7);
            assert_eq!(code(shared(number.cast::<Handle<Shelf>>())), RIOP_HANDLE);
            assert_eq!(code(free(number.cast::<Handle<Shelf>>())), RIOP_HANDLE);
            assert_eq!(code(exclusive(ptr::null_mut::<Handle<Number>>())), RIOP_ARGUMENT);
            assert_eq!(code(shared(number.byte_add(1))), RIOP_HANDLE);
            let mut memory = [0_u64; 8];
            assert_eq!(code(free(memory.as_mut_ptr().cast::<Handle<Number>>())), RIOP_HANDLE);
            assert_eq!(code(free(number)), 0);
            assert_eq!(code(free(ptr::null_mut::<Handle<Number>>())), 0);
        }
    }

    #[test]
    fn a_call_that_has_the_object_for_itself_keeps_others_out() {
        let number = new(Number(1));
        // SAFETY: the object is freed at the end of this test.
        unsafe {
            let one = shared(number).unwrap();
            let two = shared(number).unwrap();
            assert_eq!(code(exclusive(number)), RIOP_BUSY);
            assert_eq!(code(free(number)), RIOP_BUSY);
            drop((one, two));
            let mut all = exclusive(number).unwrap();
            all.0 = 2;
            assert_eq!(code(shared(number)), RIOP_BUSY);
            assert_eq!(code(exclusive(number)), RIOP_BUSY);
            assert_eq!(
                code(consume(number, |value| Ok::<_, NotConsumed<Number>>(value.0))),
                RIOP_BUSY
            );
            drop(all);
            assert_eq!(shared(number).unwrap().0, 2);
            assert_eq!(code(free(number)), 0);
        }
    }

    #[test]
    fn a_value_that_is_not_consumed_is_as_before() {
        let shelf = Arc::new(());
        let object = new(Shelf(Arc::clone(&shelf)));
        // SAFETY: the second call frees the object.
        unsafe {
            let refused = consume(object, |shelf| {
                Err::<(), _>(Box::new((shelf, Failure::new(RIOP_BUSY, String::new()))))
            });
            assert_eq!((code(refused), Arc::strong_count(&shelf)), (RIOP_BUSY, 2));
            let taken = consume(object, |shelf| Ok::<_, NotConsumed<Shelf>>(shelf.0));
            drop(taken.unwrap());
        }
        assert_eq!(Arc::strong_count(&shelf), 1);
    }

    #[test]
    fn an_object_that_a_panic_has_broken_can_only_be_freed() {
        let shelf = Arc::new(());
        for consumes in [false, true] {
            let object = new(Shelf(Arc::clone(&shelf)));
            // SAFETY: the object is freed at the end.
            unsafe {
                let panicked = catch_unwind(AssertUnwindSafe(|| {
                    if consumes {
                        let _ = consume(object, |_| -> Result<(), NotConsumed<Shelf>> {
                            panic!("now")
                        });
                    }
                    let _all = exclusive(object).unwrap();
                    panic!("in the middle");
                }));
                assert!(panicked.is_err());
                assert_eq!(code(shared(object)), RIOP_PANIC);
                assert_eq!(code(exclusive(object)), RIOP_PANIC);
                assert_eq!(code(free(object)), 0);
            }
            assert_eq!(Arc::strong_count(&shelf), 1);
        }
    }
}
